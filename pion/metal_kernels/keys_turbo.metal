// The key forms of turbo4, turbo3 and turbo2, turned by the rope. Partners mirror each other in half a head, or in half
// a row of keys without a rope.
//
// One thread per pair (j, j + D/2) of a head, which the rope turns; the last value of an odd head is its own pair and
// is not turned. `turns` holds, for each row, D/2 cosines and D/2 sines: angles need double precision, which Metal
// lacks, and all layers share them. BLOCK bytes of a block; TURNED: there is a rope.
const uint dim = H * D, half_head = D / 2, width = (D + 1) / 2;
const uint pairs = (TURNED ? D : dim) / 2;
uint row = thread_position_in_grid.y;
uint head = thread_position_in_grid.x / width, j = thread_position_in_grid.x % width;
uint skip = extent[0], count = extent[1], capacity = extent[2];
bool paired = j < half_head;
float value[2] = {0.0f, 0.0f};
if (row < count) {
    uint place = (row + skip) % 64, block = (row + skip) / 64 * BLOCK;
    uint octet = block + place / 8 * (BITS * dim), scales = block + 8 * BITS * dim;
    for (uint side = 0; side < (paired ? 2u : 1u); side++) {
        uint channel = head * D + (paired ? j + side * half_head : D - 1), scale = scales + 2 * channel;
        uint plane[BITS + 1];
        key_planes<BITS>(rows, octet, scales, dim, channel, key_partner(channel, TURNED ? head * D : 0, pairs), plane);
        value[side] = half_at(rows, scale + 2 * dim) + fabs(half_at(rows, scale)) * key_code<BITS>(plane, place % 8);
    }
    if (TURNED && paired) {
        float c = turns[row * 2 * half_head + j], s = turns[row * 2 * half_head + half_head + j];
        float low = value[0], high = value[1];
        value[0] = low * c - high * s;
        value[1] = high * c + low * s;
    }
}
// Turning may lengthen one of a pair beyond what a half holds; of the types, only half rounds 65505 to its end.
bool narrow = float(T(65505.0f)) == 65504.0f;
if (narrow) {
    value[0] = within_half(value[0]);
    value[1] = within_half(value[1]);
}
uint start = (head * capacity + row) * D;
if (paired) {
    out[start + j] = T(value[0]);
    out[start + half_head + j] = T(value[1]);
} else {
    out[start + D - 1] = T(value[0]);
}
