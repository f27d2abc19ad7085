// Tables of the turbo formats; pion/ref/turbo.py has the same.

// Lloyd-Max levels of N(0, 1), positive half: for 2, 3 and 4 bits, at 2^(bits - 1) - 2.
constant float turbo_levels[14] = {
    0.45278004f, 1.5104176f,
    0.24509418f, 0.7560053f, 1.3439093f, 2.1519456f,
    0.12839504f, 0.3880483f, 0.65675914f, 0.94234043f, 1.2562312f, 1.6180464f, 2.0690172f, 2.7325895f,
};

// cos + sin of 2 pi t / m for m = 3, 5, ... 15, one after the other; m starts at (m * m - 2 * m - 3) / 4.
constant float turbo_hartley[63] = {
    1.0f, 0.36602542f, -1.3660254f,
    1.0f, 1.2600735f, -0.22123174f, -1.3968023f, -0.64203954f,
    1.0f, 1.4053212f, 0.75240695f, -0.46708512f, -1.3348526f, -1.1974488f, -0.15834168f,
    1.0f, 1.4088321f, 1.158456f, 0.36602542f, -0.59767246f, -1.2817128f, -1.3660254f, -0.81115955f, 0.12325683f,
    1.0f, 1.3818944f, 1.325047f, 0.8475066f, 0.10088884f, -0.6777604f, -1.2412255f, -1.4106103f, -1.1321362f,
    -0.49421698f, 0.30061272f,
    1.0f, 1.3501792f, 1.3910487f, 1.1132456f, 0.5804114f, -0.08538809f, -0.73162615f, -1.2102575f, -1.4116334f,
    -1.2896211f, -0.8721722f, -0.2549191f, 0.42073286f,
    1.0f, 1.3202821f, 1.4122754f, 1.2600735f, 0.8899934f, 0.36602542f, -0.22123174f, -0.7702359f, -1.1860592f,
    -1.3968023f, -1.3660254f, -1.0990504f, -0.64203954f, -0.07401422f, 0.5068088f,
};

constant uint turbo_seeds[2] = {0xf793a9b9u, 0x2b4861ecu};

// The random signs: bit i % 32 of a hash (the finalizer of MurmurHash3) of seed + i / 32 negates value i.
inline float turbo_flip(float value, uint i, uint seed) {
    uint word = seed + i / 32;
    word = (word ^ word >> 16) * 0x85ebca6bu;
    word = (word ^ word >> 13) * 0xc2b2ae35u;
    word ^= word >> 16;
    return as_type<float>(as_type<uint>(value) ^ word >> i % 32 << 31);
}

// The size of the first block of the `left` values that remain of a piece: see pion/ref/turbo.py.
inline uint turbo_block(uint left, uint most) {
    uint low = left & (~left + 1), n = left;
    if (left > most || left / low > 15) {
        n = most;
        while (n > left) n /= 2;
    }
    return n;
}

// The level of the code of BITS bits that begins `bit` bits behind byte `at`.
template <int BITS, typename P>
inline float turbo_level(P bytes, uint at, uint bit) {
    const uint half_codes = 1 << (BITS - 1);
    uint place = at + bit / 8, shift = bit % 8, word = bytes[place];
    if (shift + BITS > 8) word |= uint(bytes[place + 1]) << 8;
    uint code = word >> shift & (2 * half_codes - 1);
    float level = turbo_levels[half_codes - 2 + (code & (half_codes - 1))];
    return code & half_codes ? -level : level;
}

// The 16-bit gain at a place: bits 30..15 of an fp32.
template <typename P>
inline float turbo_gain(P bytes, uint at) {
    return as_type<float>((uint(bytes[at]) | uint(bytes[at + 1]) << 8) << 15);
}

// y, of n = m * 2^k values with m odd, times the matrix Hartley(m) (x) Hadamard(2^k): additions of pairs a barrier
// apart, and then for m > 1 sums over columns, each of which one thread owns. All threads of a threadgroup; ends with a
// barrier.
inline void turbo_spread(threadgroup float *y, uint n, uint t, uint threads) {
    uint run = n & (~n + 1), m = n / run;
    for (uint stride = run / 2; stride > 0; stride /= 2) {
        for (uint k = t; k < n / 2; k += threads) {
            uint i = k / stride * (2 * stride) + k % stride;
            float a = y[i], b = y[i + stride];
            y[i] = a + b;
            y[i + stride] = a - b;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (m > 1) {
        uint table = (m * m - 2 * m - 3) / 4;
        for (uint column = t; column < run; column += threads) {
            float values[15];
            for (uint j = 0; j < m; j++) values[j] = y[j * run + column];
            for (uint k = 0; k < m; k++) {
                float sum = values[0];
                for (uint j = 1; j < m; j++) sum = sum + values[j] * turbo_hartley[table + j * k % m];
                y[k * run + column] = sum;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
