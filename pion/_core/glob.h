/* Glob patterns of KEYS, SCAN MATCH and the like: * ? [abc] [^a-z] and \ for the next character as it is.
 *
 * One star is remembered at a time: whatever a later star matches, an earlier one need not be tried again, so the cost
 * is at most pattern times text.
 */
#ifndef PION_GLOB_H
#define PION_GLOB_H

#include <stddef.h>
#include <stdint.h>

/* Whether the class that opens at p[*at] holds c; *at moves behind it. A class without ] ends with the pattern. */
static inline int glob_class(const uint8_t *p, size_t n, size_t *at, uint8_t c) {
    size_t i = *at + 1;
    int found = 0;
    const int negated = i < n && p[i] == '^';
    if (negated) i++;
    while (i < n && p[i] != ']') {
        if (p[i] == '\\' && i + 1 < n) {
            found |= p[i + 1] == c;
            i += 2;
        } else if (i + 2 < n && p[i + 1] == '-') {
            const uint8_t a = p[i], b = p[i + 2];
            found |= a <= b ? (a <= c && c <= b) : (b <= c && c <= a);
            i += 3;
        } else {
            found |= p[i++] == c;
        }
    }
    *at = i < n ? i + 1 : n;
    return found != negated;
}

/* Whether the pattern's next item matches c; *at moves behind the item. */
static inline int glob_one(const uint8_t *p, size_t n, size_t *at, uint8_t c) {
    const uint8_t item = p[*at];
    if (item == '[') return glob_class(p, n, at, c);
    if (item == '\\' && *at + 1 < n) ++*at;
    const uint8_t literal = p[(*at)++];
    return item == '?' || literal == c;
}

static inline int glob_match(const uint8_t *p, size_t n, const uint8_t *text, size_t len) {
    size_t at = 0, i = 0, star = SIZE_MAX, mark = 0;
    while (i < len) {
        if (at < n && p[at] == '*') {
            star = ++at;
            mark = i;
            continue;
        }
        size_t next = at;
        if (at < n && glob_one(p, n, &next, text[i])) {
            at = next;
            i++;
            continue;
        }
        if (star == SIZE_MAX) return 0;
        at = star;
        i = ++mark;
    }
    while (at < n && p[at] == '*') at++;
    return at == n;
}

#endif
