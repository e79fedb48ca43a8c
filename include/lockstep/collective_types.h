// SPDX-License-Identifier: Apache-2.0
// lockstep/collective_types.h: the words of a collective call: dtypes, reductions, algorithms, operations.
//
// Threads: values
// Ranks:   the numeric values travel between ranks, so all ranks of a job need the same build
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

// Carries a short text of every rank to all: the texts, in rank order.
using ExchangeTexts = std::function<std::vector<std::string>(const std::string& mine)>;

inline constexpr int kAnyRank = -1;  // a receive from whoever sends first

enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kUInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,  // one byte, 0 or 1
};
inline constexpr int kDTypes = 10;

// Every reduction takes the ranks in the order 0 ... p-1. float16 and bfloat16 are accumulated in float32 and rounded
// once. min and max give NaN where any rank has NaN. Integers wrap; their mean is the wrapped sum divided by p, towards
// zero. For bool, sum and max are "or", product and min are "and", and there is no mean.
enum class ReduceOp : uint8_t { kSum, kMean, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor };
inline constexpr int kReduceOps = 8;

// The algorithm of all_reduce. Use kFastest; the others are there for comparison, and for sums in a known order.
enum class Algorithm : uint8_t {
  kDirect,   // rank r reduces slice r of everybody's buffer: the same bits as kCentral
  kCentral,  // rank 0 reduces everything, the others copy it
  kRing,     // scatter-reduce, then all-gather, around a ring; slice s is summed in the order s, s+1, ..., s-1
  kTree,     // a binomial tree up to rank 0 and down again; summed pairwise, ((0+1)+(2+3))+...
  kFastest,  // kDirect; kRing between three machines and more, for large arrays of other than 16-bit floats
};

enum class Operation : uint8_t {
  kNone,
  kBarrier,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kSubgroup,
  kStep,  // a barrier of a training step
  kSend,
  kReceive,
};

size_t size_of(DType dtype);  // bytes of one element

std::string to_string(DType dtype);  // "float32", as torch prints it
std::string to_string(ReduceOp op);
std::string to_string(Algorithm algorithm);
std::string to_string(Operation operation);  // "all_reduce"

}  // namespace lockstep
