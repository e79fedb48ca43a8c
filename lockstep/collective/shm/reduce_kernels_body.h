// SPDX-License-Identifier: Apache-2.0
// collective/shm/reduce_kernels_body.h: the kernels themselves, compiled once per instruction set.
//
// Included by reduce_kernels.cc and reduce_kernels_avx512.cc, which say in which namespace (LOCKSTEP_KERNELS) and with
// how many bytes a vector (LOCKSTEP_VECTOR_BYTES), and have included everything this needs. It calls no function of the
// standard library: one compiled for a newer processor could end up in a program that runs on an older one.

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace lockstep::shm::LOCKSTEP_KERNELS {
namespace {

constexpr std::size_t kVectorBytes = LOCKSTEP_VECTOR_BYTES;
constexpr std::size_t kUnroll = 4;  // vectors in flight

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

// An element that is computed with as it is stored.
template <class T>
struct Plain {
  static constexpr std::size_t kBytes = sizeof(T);
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(T);
  using Scalar = T;
  typedef T Vector __attribute__((vector_size(kVectorBytes)));

  static LOCKSTEP_INLINE Vector load(const std::byte* from) {
    Vector value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  static LOCKSTEP_INLINE void store(std::byte* to, Vector value) { __builtin_memcpy(to, &value, sizeof value); }
};

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef std::uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

struct BFloat16 {
  static constexpr std::size_t kBytes = 2;
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(float);
  using Scalar = float;
  using Vector = Floats;

  static LOCKSTEP_INLINE Vector load(const std::byte* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    return (Vector)words;
  }
  static LOCKSTEP_INLINE void store(std::byte* to, Vector value) {
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;  // to nearest, ties to even
    const Words quiet_nan = (bits >> 16) | 0x40U;
    const Words is_nan = (Words)(value != value);
    const Halves halves = __builtin_convertvector((is_nan & quiet_nan) | (~is_nan & rounded), Halves);
    __builtin_memcpy(to, &halves, sizeof halves);
  }
};

struct Float16 {
  static constexpr std::size_t kBytes = 2;
  static constexpr std::size_t kLanes = kVectorBytes / sizeof(float);
  using Scalar = float;
  using Vector = Floats;

  static LOCKSTEP_INLINE Vector load(const std::byte* from);
  static LOCKSTEP_INLINE void store(std::byte* to, Vector value);
};

#if LOCKSTEP_VECTOR_BYTES == 64
// Masked forms with every lane on: g++ 12 warns about the plain ones (gcc bug 105593).
constexpr __mmask16 kAll = 0xffff;
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
LOCKSTEP_INLINE Floats Float16::load(const std::byte* from) {
  return (Floats)_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
LOCKSTEP_INLINE void Float16::store(std::byte* to, Floats value) {
  const __m256i halves = _mm512_maskz_cvtps_ph(kAll, (__m512)value, kNearest);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
#elif LOCKSTEP_VECTOR_BYTES == 32
LOCKSTEP_INLINE Floats Float16::load(const std::byte* from) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
LOCKSTEP_INLINE void Float16::store(std::byte* to, Floats value) {
  const __m128i halves = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}
#else
// Without conversion instructions in reach of the language: scale by powers of two, which rounds subnormals too.
LOCKSTEP_INLINE Floats Float16::load(const std::byte* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words);
  const Words magnitude = (words & 0x7fffU) << 13;
  const Words special = (Words)(magnitude >= (0x7c00U << 13)) & 0x7f800000U;
  const Floats finite = (Floats)magnitude * 0x1p112F;
  return (Floats)((Words)finite | special | ((words & 0x8000U) << 16));
}
LOCKSTEP_INLINE void Float16::store(std::byte* to, Floats value) {
  const Words bits = (Words)value;
  const Words magnitude = bits & 0x7fffffffU;
  const Words normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  const Words subnormal = (Words)((Floats)magnitude + 0.5F) - 0x3f000000U;
  const Words is_subnormal = (Words)(magnitude < 0x38800000U);
  const Words overflows = (Words)(magnitude >= 0x477ff000U);
  const Words is_nan = (Words)(magnitude > 0x7f800000U);
  Words half = (is_subnormal & subnormal) | (~is_subnormal & normal);
  half = (~overflows & half) | (overflows & 0x7c00U);
  half = (~is_nan & half) | (is_nan & (0x7e00U | ((magnitude >> 13) & 0x3ffU)));
  const Halves halves = __builtin_convertvector(half | ((bits >> 16) & 0x8000U), Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
}
#endif

struct Sum {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return a + b;
  }
};
struct Product {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return a * b;
  }
};
struct Min {  // b != b: NaN wins
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct And {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return a | b;
  }
};
struct Xor {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return a ^ b;
  }
};

// What is done to the total before it is stored.
struct Keep {
  template <class E>
  static LOCKSTEP_INLINE typename E::Vector apply(typename E::Vector total, int) {
    return total;
  }
};
struct Divide {
  template <class E>
  static LOCKSTEP_INLINE typename E::Vector apply(typename E::Vector total, int divisor) {
    return total / static_cast<typename E::Scalar>(divisor);
  }
};
template <class Signed>
struct DivideInteger {  // sums are taken unsigned, because they may wrap
  template <class E>
  static LOCKSTEP_INLINE typename E::Vector apply(typename E::Vector total, int divisor) {
    for (std::size_t lane = 0; lane < E::kLanes; ++lane)
      total[lane] =
          static_cast<typename E::Scalar>(static_cast<std::int64_t>(static_cast<Signed>(total[lane])) / divisor);
    return total;
  }
};

// As many bytes as a vector of E takes in memory, which is half a register for 16-bit floats. `to` is aligned to that.
template <class E>
LOCKSTEP_INLINE void store_past_caches(std::byte* to, typename E::Vector value) {
#if LOCKSTEP_VECTOR_BYTES >= 32
  alignas(kVectorBytes) std::byte stored[kVectorBytes];
  E::store(stored, value);
  constexpr std::size_t kStored = E::kLanes * E::kBytes;
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
template <class E, class Op, class Finish, std::size_t N>
LOCKSTEP_INLINE void reduce_vectors(const Reduction& job, std::size_t at, std::size_t streamed) {
  constexpr std::size_t kStride = E::kLanes * E::kBytes;
  const std::byte* const* sources = job.sources.data();
  typename E::Vector total[N];
  for (std::size_t u = 0; u < N; ++u) total[u] = E::load(sources[0] + at * E::kBytes + u * kStride);
  for (std::size_t q = 1; q < job.sources.size(); ++q)
    for (std::size_t u = 0; u < N; ++u)
      total[u] = Op::apply(total[u], E::load(sources[q] + at * E::kBytes + u * kStride));
  for (std::size_t u = 0; u < N; ++u) total[u] = Finish::template apply<E>(total[u], job.divisor);
  std::byte* const* const destinations = job.destinations.data();
  for (std::size_t d = 0; d < streamed; ++d)
    for (std::size_t u = 0; u < N; ++u) store_past_caches<E>(destinations[d] + at * E::kBytes + u * kStride, total[u]);
  for (std::size_t d = streamed; d < job.destinations.size(); ++d)
    for (std::size_t u = 0; u < N; ++u) E::store(destinations[d] + at * E::kBytes + u * kStride, total[u]);
}

// The last elements, fewer than a vector: the same arithmetic on a padded copy.
template <class E, class Op, class Finish>
void reduce_tail(const Reduction& job, std::size_t at) {
  const std::size_t bytes = (job.count - at) * E::kBytes;
  alignas(kVectorBytes) std::byte padded[kVectorBytes] = {};
  __builtin_memcpy(padded, job.sources[0] + at * E::kBytes, bytes);
  typename E::Vector total = E::load(padded);
  for (std::size_t q = 1; q < job.sources.size(); ++q) {
    __builtin_memcpy(padded, job.sources[q] + at * E::kBytes, bytes);
    total = Op::apply(total, E::load(padded));
  }
  E::store(padded, Finish::template apply<E>(total, job.divisor));
  for (std::byte* const to : job.destinations) __builtin_memcpy(to + at * E::kBytes, padded, bytes);
}

// How many of the first destinations are streamed: none unless all of those are aligned.
LOCKSTEP_INLINE std::size_t streamable(const Reduction& job) {
  for (std::size_t d = 0; d < job.streamed; ++d)
    if (reinterpret_cast<std::uintptr_t>(job.destinations.data()[d]) % kVectorBytes != 0) return 0;
  return job.streamed;
}

template <class E, class Op, class Finish>
void reduce_arrays(const Reduction& job) {
  const std::size_t streamed = streamable(job);
  std::size_t at = 0;
  for (; at + kUnroll * E::kLanes <= job.count; at += kUnroll * E::kLanes)
    reduce_vectors<E, Op, Finish, kUnroll>(job, at, streamed);
  for (; at + E::kLanes <= job.count; at += E::kLanes) reduce_vectors<E, Op, Finish, 1>(job, at, streamed);
  if (at < job.count) reduce_tail<E, Op, Finish>(job, at);
#if LOCKSTEP_VECTOR_BYTES >= 32
  if (streamed > 0) _mm_sfence();  // streaming stores are weakly ordered; the flag that follows is not
#endif
}

template <class E>
Kernel float_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return reduce_arrays<E, Sum, Keep>;
    case ReduceOp::kMean: return reduce_arrays<E, Sum, Divide>;
    case ReduceOp::kProduct: return reduce_arrays<E, Product, Keep>;
    case ReduceOp::kMin: return reduce_arrays<E, Min, Keep>;
    case ReduceOp::kMax: return reduce_arrays<E, Max, Keep>;
    default: return nullptr;
  }
}

template <class T, class Unsigned>
Kernel integer_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return reduce_arrays<Plain<Unsigned>, Sum, Keep>;
    case ReduceOp::kMean: return reduce_arrays<Plain<Unsigned>, Sum, DivideInteger<T>>;
    case ReduceOp::kProduct: return reduce_arrays<Plain<Unsigned>, Product, Keep>;
    case ReduceOp::kMin: return reduce_arrays<Plain<T>, Min, Keep>;
    case ReduceOp::kMax: return reduce_arrays<Plain<T>, Max, Keep>;
    case ReduceOp::kBitAnd: return reduce_arrays<Plain<Unsigned>, And, Keep>;
    case ReduceOp::kBitOr: return reduce_arrays<Plain<Unsigned>, Or, Keep>;
    case ReduceOp::kBitXor: return reduce_arrays<Plain<Unsigned>, Xor, Keep>;
  }
  return nullptr;
}

Kernel bool_kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMean: return nullptr;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd: return reduce_arrays<Plain<std::uint8_t>, And, Keep>;
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr: return reduce_arrays<Plain<std::uint8_t>, Or, Keep>;
    case ReduceOp::kBitXor: return reduce_arrays<Plain<std::uint8_t>, Xor, Keep>;
  }
  return nullptr;
}

}  // namespace

Kernel kernel_for(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat32: return float_kernel<Plain<float>>(op);
    case DType::kFloat64: return float_kernel<Plain<double>>(op);
    case DType::kFloat16: return float_kernel<Float16>(op);
    case DType::kBFloat16: return float_kernel<BFloat16>(op);
    case DType::kInt8: return integer_kernel<std::int8_t, std::uint8_t>(op);
    case DType::kUInt8: return integer_kernel<std::uint8_t, std::uint8_t>(op);
    case DType::kInt16: return integer_kernel<std::int16_t, std::uint16_t>(op);
    case DType::kInt32: return integer_kernel<std::int32_t, std::uint32_t>(op);
    case DType::kInt64: return integer_kernel<std::int64_t, std::uint64_t>(op);
    case DType::kBool: return bool_kernel(op);
  }
  return nullptr;
}

#undef LOCKSTEP_INLINE

}  // namespace lockstep::shm::LOCKSTEP_KERNELS

#pragma GCC diagnostic pop
