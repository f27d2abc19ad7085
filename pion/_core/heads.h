/* Rows of all heads to one array for each head: the order of models' K and V, (heads, rows, values), out of the order of
 * stored rows, (rows, heads, values). */
#ifndef PION_HEADS_H
#define PION_HEADS_H

#include <stdint.h>
#include <string.h>

/* `bytes` of one head of one row. The buffers hold rows * heads * bytes each and must not overlap. */
static inline void heads_split(const void *source, void *target, size_t rows, size_t heads, size_t bytes) {
    const uint8_t *src = (const uint8_t *)source;
    uint8_t *dst = (uint8_t *)target;
    for (size_t head = 0; head < heads; head++)
        for (size_t row = 0; row < rows; row++, dst += bytes)
            memcpy(dst, src + (row * heads + head) * bytes, bytes);
}

#endif
