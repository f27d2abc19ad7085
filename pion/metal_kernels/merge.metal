// Joins the parts that several threadgroups, or several calls, made of the same query rows. One thread per value.
// parts: (splits, all, D), tops: (splits, all, 2), see softmax.metal. SINKS: each query head has a logit of its own
// that takes part in the softmax and has no value; `length` rows belong to a head. A row that saw nothing is 0 and
// -inf.
uint d = thread_position_in_grid.x, row = thread_position_in_grid.y;
uint splits = extent[0], all = extent[1], length = extent[2];
float high = SINKS ? sinks[row / length] : -INFINITY;
for (uint s = 0; s < splits; s++) {
    float one = tops[2 * (s * all + row)];
    high = one > high ? one : high;
}
float total = SINKS ? weight_of(sinks[row / length], high) : 0.0f, value = 0.0f;
for (uint s = 0; s < splits; s++) {
    float weight = weight_of(tops[2 * (s * all + row)], high);
    total += weight * tops[2 * (s * all + row) + 1];
    value += weight * parts[(s * all + row) * D + d];
}
out[row * D + d] = total == 0.0f ? 0.0f : value / total;
if (d == 0) lse[row] = total == 0.0f ? -INFINITY : (high == -INFINITY ? 0.0f : high) + log(total);
