// SPDX-License-Identifier: Apache-2.0
// collective/shm/reduce_kernels_body.h: the kernels themselves, compiled once per instruction set.
//
// Included by reduce_kernels.cc, which says in which namespace (LOCKSTEP_KERNELS) and with how many bytes a vector
// (LOCKSTEP_VECTOR_BYTES), and has included everything this needs. It calls no function of the standard library: one
// compiled for a newer processor could end up in a program that runs on an older one.

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace lockstep::shm::LOCKSTEP_KERNELS {
namespace {

constexpr size_t kVectorBytes = LOCKSTEP_VECTOR_BYTES;
constexpr size_t kUnroll = 4;  // vectors in flight

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

template <class Vector>
LOCKSTEP_INLINE Vector load_vector(const std::byte* from) {
  Vector value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <class Vector>
LOCKSTEP_INLINE void store_vector(std::byte* to, Vector value) {
  __builtin_memcpy(to, &value, sizeof value);
}

// An element that is computed with as it is stored, and divided as a Quotient: sums of integers are taken unsigned,
// because they may wrap.
template <class T, class Quotient = T>
struct Plain {
  static constexpr size_t kBytes = sizeof(T);
  static constexpr size_t kLanes = kVectorBytes / sizeof(T);
  typedef T Vector __attribute__((vector_size(kVectorBytes)));

  static LOCKSTEP_INLINE Vector load(const std::byte* from) { return load_vector<Vector>(from); }
  static LOCKSTEP_INLINE void store(std::byte* to, Vector value) { store_vector(to, value); }
  static LOCKSTEP_INLINE Vector divide(Vector total, int divisor) {
    if constexpr (std::is_floating_point_v<T>) return total / static_cast<T>(divisor);
    for (size_t lane = 0; lane < kLanes; ++lane)
      total[lane] = static_cast<T>(static_cast<int64_t>(static_cast<Quotient>(total[lane])) / divisor);
    return total;
  }
};

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

// An element of 16 bits that is computed with as a float.
struct Half {
  static constexpr size_t kBytes = 2;
  static constexpr size_t kLanes = kVectorBytes / sizeof(float);
  using Vector = Floats;

  static LOCKSTEP_INLINE Words load_words(const std::byte* from) {
    return __builtin_convertvector(load_vector<Halves>(from), Words);
  }
  static LOCKSTEP_INLINE void store_words(std::byte* to, Words words) {
    store_vector(to, __builtin_convertvector(words, Halves));
  }
  static LOCKSTEP_INLINE Vector divide(Vector total, int divisor) { return total / static_cast<float>(divisor); }
};

struct BFloat16 : Half {
  static LOCKSTEP_INLINE Vector load(const std::byte* from) { return (Vector)(load_words(from) << 16); }
  static LOCKSTEP_INLINE void store(std::byte* to, Vector value) {
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;  // to nearest, ties to even
    const Words quiet_nan = (bits >> 16) | 0x40U;
    const Words is_nan = (Words)(value != value);
    store_words(to, (is_nan & quiet_nan) | (~is_nan & rounded));
  }
};

struct Float16 : Half {
#if LOCKSTEP_VECTOR_BYTES == 64
  // Masked forms with every lane on: g++ 12 warns about the plain ones (gcc bug 105593).
  static LOCKSTEP_INLINE Vector load(const std::byte* from) {
    return (Vector)_mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(from));
  }
  static LOCKSTEP_INLINE void store(std::byte* to, Vector value) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    store_vector(to, _mm512_maskz_cvtps_ph(0xffff, (__m512)value, kNearest));
  }
#elif LOCKSTEP_VECTOR_BYTES == 32
  static LOCKSTEP_INLINE Vector load(const std::byte* from) {
    return (Vector)_mm256_cvtph_ps(load_vector<__m128i>(from));
  }
  static LOCKSTEP_INLINE void store(std::byte* to, Vector value) {
    store_vector(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  // Without conversion instructions in reach of the language: scale by powers of two, which rounds subnormals too.
  static LOCKSTEP_INLINE Vector load(const std::byte* from) {
    const Words words = load_words(from);
    const Words magnitude = (words & 0x7fffU) << 13;
    const Words special = (Words)(magnitude >= (0x7c00U << 13)) & 0x7f800000U;
    const Vector finite = (Vector)magnitude * 0x1p112F;
    return (Vector)((Words)finite | special | ((words & 0x8000U) << 16));
  }
  static LOCKSTEP_INLINE void store(std::byte* to, Vector value) {
    const Words bits = (Words)value;
    const Words magnitude = bits & 0x7fffffffU;
    const Words normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
    const Words subnormal = (Words)((Vector)magnitude + 0.5F) - 0x3f000000U;
    const Words is_subnormal = (Words)(magnitude < 0x38800000U);
    const Words overflows = (Words)(magnitude >= 0x477ff000U);
    const Words is_nan = (Words)(magnitude > 0x7f800000U);
    Words half = (is_subnormal & subnormal) | (~is_subnormal & normal);
    half = (~overflows & half) | (overflows & 0x7c00U);
    half = (~is_nan & half) | (is_nan & (0x7e00U | ((magnitude >> 13) & 0x3ffU)));
    store_words(to, half | ((bits >> 16) & 0x8000U));
  }
#endif
};

template <ReduceOp op, class Vector>
LOCKSTEP_INLINE Vector combine(Vector a, Vector b) {
  if constexpr (op == ReduceOp::kSum || op == ReduceOp::kMean) return a + b;
  if constexpr (op == ReduceOp::kProduct) return a * b;
  if constexpr (op == ReduceOp::kMin) return ((b < a) | (b != b)) ? b : a;  // b != b: NaN wins
  if constexpr (op == ReduceOp::kMax) return ((b > a) | (b != b)) ? b : a;
  if constexpr (op == ReduceOp::kBitAnd) return a & b;
  if constexpr (op == ReduceOp::kBitOr) return a | b;
  if constexpr (op == ReduceOp::kBitXor) return a ^ b;
}

// Divides the total of a mean, before it is stored.
template <class E, ReduceOp op>
LOCKSTEP_INLINE typename E::Vector finish(typename E::Vector total, int divisor) {
  if constexpr (op == ReduceOp::kMean) return E::divide(total, divisor);
  return total;
}

// As many bytes as a vector of E takes in memory, which is half a register for 16-bit floats. `to` is aligned to that.
template <class E>
LOCKSTEP_INLINE void store_past_caches(std::byte* to, typename E::Vector value) {
#if LOCKSTEP_VECTOR_BYTES >= 32
  alignas(kVectorBytes) std::byte stored[kVectorBytes];
  E::store(stored, value);
  constexpr size_t kStored = E::kLanes * E::kBytes;
  if constexpr (kStored == 16) _mm_stream_si128((__m128i*)to, _mm_load_si128((const __m128i*)stored));
  if constexpr (kStored == 32) _mm256_stream_si256((__m256i*)to, _mm256_load_si256((const __m256i*)stored));
#if LOCKSTEP_VECTOR_BYTES == 64
  if constexpr (kStored == 64) _mm512_stream_si512((__m512i*)to, _mm512_load_si512((const __m512i*)stored));
#endif
#else
  E::store(to, value);
#endif
}

// Elements [at, at + N vectors) of everything.
template <class E, ReduceOp op, size_t N>
LOCKSTEP_INLINE void reduce_vectors(const Reduction& job, size_t at, size_t streamed) {
  constexpr size_t kStride = E::kLanes * E::kBytes;
  const std::byte* const* sources = job.sources.data();
  typename E::Vector total[N];
  for (size_t u = 0; u < N; ++u) total[u] = E::load(sources[0] + at * E::kBytes + u * kStride);
  for (size_t q = 1; q < job.sources.size(); ++q)
    for (size_t u = 0; u < N; ++u) total[u] = combine<op>(total[u], E::load(sources[q] + at * E::kBytes + u * kStride));
  for (size_t u = 0; u < N; ++u) total[u] = finish<E, op>(total[u], job.divisor);
  std::byte* const* const destinations = job.destinations.data();
  for (size_t d = 0; d < streamed; ++d)
    for (size_t u = 0; u < N; ++u) store_past_caches<E>(destinations[d] + at * E::kBytes + u * kStride, total[u]);
  for (size_t d = streamed; d < job.destinations.size(); ++d)
    for (size_t u = 0; u < N; ++u) E::store(destinations[d] + at * E::kBytes + u * kStride, total[u]);
}

// The last elements, fewer than a vector: the same arithmetic on a padded copy.
template <class E, ReduceOp op>
void reduce_tail(const Reduction& job, size_t at) {
  const size_t bytes = (job.count - at) * E::kBytes;
  alignas(kVectorBytes) std::byte padded[kVectorBytes] = {};
  __builtin_memcpy(padded, job.sources[0] + at * E::kBytes, bytes);
  typename E::Vector total = E::load(padded);
  for (size_t q = 1; q < job.sources.size(); ++q) {
    __builtin_memcpy(padded, job.sources[q] + at * E::kBytes, bytes);
    total = combine<op>(total, E::load(padded));
  }
  E::store(padded, finish<E, op>(total, job.divisor));
  for (std::byte* const to : job.destinations) __builtin_memcpy(to + at * E::kBytes, padded, bytes);
}

// Counts the first destinations that are streamed: none unless all of those are aligned.
LOCKSTEP_INLINE size_t streamable(const Reduction& job) {
  for (size_t d = 0; d < job.streamed; ++d)
    if (reinterpret_cast<uintptr_t>(job.destinations.data()[d]) % kVectorBytes != 0) return 0;
  return job.streamed;
}

template <class E, ReduceOp op>
void reduce_arrays(const Reduction& job) {
  const size_t streamed = streamable(job);
  size_t at = 0;
  for (; at + kUnroll * E::kLanes <= job.count; at += kUnroll * E::kLanes)
    reduce_vectors<E, op, kUnroll>(job, at, streamed);
  for (; at + E::kLanes <= job.count; at += E::kLanes) reduce_vectors<E, op, 1>(job, at, streamed);
  if (at < job.count) reduce_tail<E, op>(job, at);
#if LOCKSTEP_VECTOR_BYTES >= 32
  if (streamed > 0) _mm_sfence();  // streaming stores are weakly ordered; the flag that follows is not
#endif
}

// The kernel for `op`, if it is one of `ops`.
template <class E, ReduceOp... ops>
Kernel kernel_of(ReduceOp op) {
  Kernel found = nullptr;
  ((found = op == ops ? reduce_arrays<E, ops> : found), ...);
  return found;
}

template <class E>
Kernel float_kernel(ReduceOp op) {
  using enum ReduceOp;
  return kernel_of<E, kSum, kMean, kProduct, kMin, kMax>(op);
}

template <class T, class Unsigned>
Kernel integer_kernel(ReduceOp op) {
  using enum ReduceOp;
  if (op == kMin || op == kMax) return kernel_of<Plain<T>, kMin, kMax>(op);
  return kernel_of<Plain<Unsigned, T>, kSum, kMean, kProduct, kBitAnd, kBitOr, kBitXor>(op);
}

Kernel bool_kernel(ReduceOp op) {
  const auto bits = integer_kernel<uint8_t, uint8_t>;
  switch (op) {
    case ReduceOp::kMean: return nullptr;
    case ReduceOp::kProduct:
    case ReduceOp::kMin: return bits(ReduceOp::kBitAnd);
    case ReduceOp::kSum:
    case ReduceOp::kMax: return bits(ReduceOp::kBitOr);
    default: return bits(op);
  }
}

}  // namespace

Kernel kernel_for(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat32: return float_kernel<Plain<float>>(op);
    case DType::kFloat64: return float_kernel<Plain<double>>(op);
    case DType::kFloat16: return float_kernel<Float16>(op);
    case DType::kBFloat16: return float_kernel<BFloat16>(op);
    case DType::kInt8: return integer_kernel<int8_t, uint8_t>(op);
    case DType::kUInt8: return integer_kernel<uint8_t, uint8_t>(op);
    case DType::kInt16: return integer_kernel<int16_t, uint16_t>(op);
    case DType::kInt32: return integer_kernel<int32_t, uint32_t>(op);
    case DType::kInt64: return integer_kernel<int64_t, uint64_t>(op);
    case DType::kBool: return bool_kernel(op);
  }
  return nullptr;
}

}  // namespace lockstep::shm::LOCKSTEP_KERNELS

#undef LOCKSTEP_INLINE
#undef LOCKSTEP_KERNELS
#undef LOCKSTEP_VECTOR_BYTES
#pragma GCC diagnostic pop
