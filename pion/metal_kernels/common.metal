// Shared by all kernels. Stored rows are bytes: rows of an odd size leave words unaligned, so words are put together.

// `bytes` points into device or into constant memory: MLX hands small inputs over in the latter.
template <typename P>
inline float half_at(P bytes, uint at) {
    return float(as_type<half>(ushort(uint(bytes[at]) | uint(bytes[at + 1]) << 8)));
}

// What every quantized format promises: whatever was stored fits fp16 again. A NaN passes.
inline float within_half(float value) {
    value = value > 65504.0f ? 65504.0f : value;
    return value < -65504.0f ? -65504.0f : value;
}
