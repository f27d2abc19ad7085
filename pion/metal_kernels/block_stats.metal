// Mean, least and largest of each value of the keys in blocks of `block` positions; the last block over what it holds.
// One thread per block and value. k: (heads, stored, D); mean, low, high: (heads, blocks, D).
uint d = thread_position_in_grid.x, number = thread_position_in_grid.y, head = thread_position_in_grid.z;
uint stored = extent[0], block = extent[1], blocks = (stored + block - 1) / block;
uint begin = number * block, end = stored - begin < block ? stored : begin + block;
float total = 0.0f, least = INFINITY, most = -INFINITY;
for (uint n = begin; n < end; n++) {
    float key = float(k[(head * stored + n) * D + d]);
    total += key;
    least = key < least ? key : least;
    most = key > most ? key : most;
}
uint at = (head * blocks + number) * D + d;
mean[at] = total / float(end - begin);
low[at] = least;
high[at] = most;
