// turbo4, turbo3, turbo2: the packed codes of all blocks, then a 16-bit gain (bits 30..15 of an fp32) for each block.
// A decoded block is its levels, times a matrix of size n, signs, the same matrix, other signs, and gain / n.
//
// One threadgroup per piece of a row: the blocks of one head, or of the whole row. The block lies in threadgroup memory;
// the matrix, Hartley(m) (x) Hadamard(2^k) with n = m * 2^k and m odd, is additions of pairs a barrier apart, and then for
// m > 1 sums over columns, each of which one thread owns. BITS, P values of a piece, N of the largest block, MOST values
// that the split allows, BLOCKS and BYTES of a piece, ROW bytes of a row, CODES bytes of its codes.
threadgroup float y[N];
uint t = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
uint piece = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
uint count = extent[0], capacity = extent[1];
if (row >= count) {
    for (uint i = piece * P + t; i < piece * P + P; i += threads) out[(i / D * capacity + row) * D + i % D] = T(0.0f);
    return; // the whole threadgroup leaves
}
const uint half_codes = 1 << (BITS - 1);
uint at = row * ROW + piece * BYTES, gain_at = row * ROW + CODES + piece * BLOCKS * 2, n = 0;
for (uint done = 0; done < P; done += n, at += (n * BITS + 7) / 8, gain_at += 2) {
    uint left = P - done, low = left & (~left + 1); // the split of a piece: see pion/ref/turbo.py
    n = left;
    if (left > MOST || left / low > 15) {
        n = MOST;
        while (n > left) n /= 2;
    }
    uint run = n & (~n + 1), m = n / run;

    for (uint i = t; i < n; i += threads) {
        uint bit = i * BITS, place = at + bit / 8, shift = bit % 8;
        uint word = rows[place];
        if (shift + BITS > 8) word |= uint(rows[place + 1]) << 8;
        uint code = word >> shift & (2 * half_codes - 1);
        float level = turbo_levels[half_codes - 2 + (code & (half_codes - 1))];
        y[i] = code & half_codes ? -level : level;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint pass = 0; pass < 2; pass++) {
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
        if (pass == 0) {
            for (uint i = t; i < n; i += threads) y[i] = turbo_flip(y[i], i, turbo_seeds[1]);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }

    float gain = as_type<float>((uint(rows[gain_at]) | uint(rows[gain_at + 1]) << 8) << 15) / float(n);
    for (uint j = t; j < n; j += threads) {
        uint i = piece * P + done + j;
        out[(i / D * capacity + row) * D + i % D] = T(within_half(turbo_flip(y[j], j, turbo_seeds[0]) * gain));
    }
    // No barrier here: the next block's y[j] is written by the thread that just read it.
}
