// SPDX-License-Identifier: Apache-2.0
// Every collective against a reference, with small integers, so that every sum is exact and compared at tolerance 0.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>

#include "lockstep/collective/shm/reduce_kernels.h"
#include "lockstep/collective/shm/thresholds.h"
#include "tests/shm/support.h"

namespace lockstep::shm {
namespace {

using testing::expect_none;
using testing::run_threads;

enum class MemoryKind { kOrdinary, kArena, kMixed, kShared };

constexpr size_t kStaging = 4096;  // many chunks with little data

Options options_for(MemoryKind kind) {
  return {.timeout = std::chrono::seconds(20),
          .staging_bytes = kStaging,
          .share_ordinary_memory = kind == MemoryKind::kShared};
}

// An array of any kind of memory.
class Array {
 public:
  Array(Group& group, MemoryKind kind, size_t bytes) {
    const bool arena = kind == MemoryKind::kArena || (kind == MemoryKind::kMixed && group.rank() % 2 == 0);
    if (arena)
      memory_ = group.allocate(bytes);
    else
      ordinary_.resize(bytes);
    data_ = arena ? memory_.data() : ordinary_.data();
    std::fill_n(data_, bytes, std::byte{0x5a});
  }
  std::byte* data() const { return data_; }

 private:
  Memory memory_;
  std::vector<std::byte> ordinary_;
  std::byte* data_;
};

// Numbers that every dtype holds: 0, 1 for bool, else 1 ... 3; the product of seven of them stays below 2187.
int value_at(DType dtype, int rank, size_t index) {
  const auto mixed = (static_cast<unsigned>(rank) * 7919 + index * 31 + 5) % 3;
  return dtype == DType::kBool ? static_cast<int>(mixed % 2) : static_cast<int>(mixed) + 1;
}

template <class T>
void put(std::byte* data, size_t index, T value) {
  std::memcpy(data + index * sizeof value, &value, sizeof value);
}

uint16_t bfloat16_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

// For normal numbers: rounds to eleven significant bits, ties to even.
uint16_t float16_of(float value) {
  if (value == 0) return 0;
  int exponent = 0;
  float fraction = std::frexp(value, &exponent);  // in [0.5, 1)
  float significand = std::nearbyint(fraction * 2048);
  if (significand == 2048) {
    significand = 1024;
    ++exponent;
  }
  return static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(significand) - 1024));
}

void store(DType dtype, std::byte* data, size_t index, double value) {
  switch (dtype) {
    case DType::kFloat32: return put(data, index, static_cast<float>(value));
    case DType::kFloat64: return put(data, index, value);
    case DType::kFloat16: return put(data, index, float16_of(static_cast<float>(value)));
    case DType::kBFloat16: return put(data, index, bfloat16_of(static_cast<float>(value)));
    case DType::kInt8: return put(data, index, static_cast<int8_t>(static_cast<int64_t>(value)));
    case DType::kUInt8: return put(data, index, static_cast<uint8_t>(static_cast<int64_t>(value)));
    case DType::kInt16: return put(data, index, static_cast<int16_t>(static_cast<int64_t>(value)));
    case DType::kInt32: return put(data, index, static_cast<int32_t>(value));
    case DType::kInt64: return put(data, index, static_cast<int64_t>(value));
    case DType::kBool: return put(data, index, static_cast<uint8_t>(value));
  }
}

template <class T>
double wrapped(int64_t value) {
  return static_cast<double>(static_cast<T>(value));
}

// What an integer of this dtype keeps of a value.
double kept(DType dtype, int64_t value) {
  switch (dtype) {
    case DType::kInt8: return wrapped<int8_t>(value);
    case DType::kUInt8: return wrapped<uint8_t>(value);
    case DType::kInt16: return wrapped<int16_t>(value);
    default: return static_cast<double>(value);
  }
}

bool is_float(DType dtype) { return dtype <= DType::kBFloat16; }

double reduced(DType dtype, ReduceOp op, int size, size_t index) {
  int64_t total = value_at(dtype, 0, index);
  for (int rank = 1; rank < size; ++rank) {
    const int64_t next = value_at(dtype, rank, index);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kMean: total = dtype == DType::kBool ? total | next : total + next; break;
      case ReduceOp::kProduct: total *= next; break;
      case ReduceOp::kMin: total = std::min(total, next); break;
      case ReduceOp::kMax: total = std::max(total, next); break;
      case ReduceOp::kBitAnd: total &= next; break;
      case ReduceOp::kBitOr: total |= next; break;
      case ReduceOp::kBitXor: total ^= next; break;
    }
  }
  if (op != ReduceOp::kMean) return kept(dtype, total);
  if (dtype == DType::kFloat64) return static_cast<double>(total) / size;
  if (is_float(dtype)) return static_cast<float>(total) / static_cast<float>(size);
  return static_cast<double>(static_cast<int64_t>(kept(dtype, total)) / size);
}

void fill(DType dtype, std::byte* data, int rank, size_t count, size_t first = 0) {
  for (size_t i = 0; i < count; ++i) store(dtype, data, i, value_at(dtype, rank, first + i));
}

std::vector<std::byte> expected_reduction(DType dtype, ReduceOp op, int size, size_t count) {
  std::vector<std::byte> bytes(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) store(dtype, bytes.data(), i, reduced(dtype, op, size, i));
  return bytes;
}

::testing::AssertionResult same(const std::byte* found, const std::vector<std::byte>& expected,
                                const std::string& what) {
  const auto different = std::mismatch(expected.begin(), expected.end(), found);
  if (different.first == expected.end()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << what << ": byte " << different.first - expected.begin() << " of "
                                       << expected.size() << " differs";
}

std::string name_of(DType dtype, ReduceOp op, size_t count, int rank) {
  return to_string(op) + " of " + std::to_string(count) + " " + to_string(dtype) + " at rank " + std::to_string(rank);
}

const std::vector<size_t> kCounts{0, 1, 5, 64, 1000, 4099, 20011};

class Collectives : public ::testing::TestWithParam<std::tuple<int, MemoryKind>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  MemoryKind kind() const { return std::get<1>(GetParam()); }
  void run(const std::function<void(Group&)>& body) { expect_none(run_threads(size(), body, options_for(kind()))); }
};

INSTANTIATE_TEST_SUITE_P(Shm, Collectives,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7),
                                            ::testing::Values(MemoryKind::kOrdinary, MemoryKind::kArena,
                                                              MemoryKind::kMixed, MemoryKind::kShared)));

void each_dtype_and_op(const std::function<void(DType, ReduceOp)>& body) {
  for (int dtype = 0; dtype < kDTypes; ++dtype)
    for (int op = 0; op < kReduceOps; ++op)
      if (defined(static_cast<DType>(dtype), static_cast<ReduceOp>(op)))
        body(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
}

TEST_P(Collectives, all_reduce_gives_every_rank_the_same_exact_result) {
  run([&](Group& group) {
    each_dtype_and_op([&](DType dtype, ReduceOp op) {
      for (const size_t count : {size_t{3}, size_t{4099}}) {
        const Array data(group, kind(), count * size_of(dtype));
        fill(dtype, data.data(), group.rank(), count);
        group.run({.operation = Operation::kAllReduce,
                   .input = data.data(),
                   .output = data.data(),
                   .count = count,
                   .dtype = dtype,
                   .op = op});
        EXPECT_TRUE(
            same(data.data(), expected_reduction(dtype, op, size(), count), name_of(dtype, op, count, group.rank())));
      }
    });
  });
}

TEST_P(Collectives, all_reduce_takes_any_size_and_a_separate_output) {
  run([&](Group& group) {
    for (const size_t count : kCounts) {
      const Array input(group, kind(), count * 4);
      const Array output(group, kind(), count * 4);
      fill(DType::kFloat32, input.data(), group.rank(), count);
      group.run({.operation = Operation::kAllReduce, .input = input.data(), .output = output.data(), .count = count});
      EXPECT_TRUE(same(output.data(), expected_reduction(DType::kFloat32, ReduceOp::kSum, size(), count), "sum"));
    }
  });
}

// The third collective uses the counter that the first has used.
void check_reductions_in_chunks(Group& group, MemoryKind kind, size_t count, const std::vector<std::byte>& sum) {
  const Array input(group, kind, count * 4);
  const Array output(group, kind, count * 4);
  fill(DType::kFloat32, input.data(), group.rank(), count);
  const int root = group.size() - 1;
  group.run(
      {.operation = Operation::kReduce, .input = input.data(), .output = output.data(), .count = count, .root = root});
  if (group.rank() == root) {
    EXPECT_TRUE(same(output.data(), sum, "reduce"));
  }
  group.run({.operation = Operation::kAllReduce, .input = input.data(), .output = output.data(), .count = count});
  EXPECT_TRUE(same(output.data(), sum, "all_reduce"));
  group.run({.operation = Operation::kAllReduce, .input = input.data(), .output = input.data(), .count = count});
  EXPECT_TRUE(same(input.data(), sum, "all_reduce in place"));
}

TEST(ReductionsInChunks, give_the_exact_result_in_memory_that_all_ranks_can_reach) {
  const size_t count = kInChunksFromBytes / 4 + 4099;
  for (const int size : {1, 2, 3, 4, 7}) {
    const auto sum = expected_reduction(DType::kFloat32, ReduceOp::kSum, size, count);
    for (const MemoryKind kind : {MemoryKind::kArena, MemoryKind::kShared}) {
      const auto body = [&](Group& group) { check_reductions_in_chunks(group, kind, count, sum); };
      expect_none(run_threads(size, body, options_for(kind)));
    }
  }
}

TEST_P(Collectives, all_reduce_by_every_algorithm) {
  run([&](Group& group) {
    for (const Algorithm algorithm : {Algorithm::kCentral, Algorithm::kRing, Algorithm::kTree})
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax})
        for (const size_t count : kCounts) {
          const Array input(group, kind(), count * 4);
          const Array output(group, kind(), count * 4);
          fill(DType::kFloat32, input.data(), group.rank(), count);
          group.run({.operation = Operation::kAllReduce,
                     .input = input.data(),
                     .output = output.data(),
                     .count = count,
                     .op = op,
                     .algorithm = algorithm});
          EXPECT_TRUE(
              same(output.data(), expected_reduction(DType::kFloat32, op, size(), count), to_string(algorithm)));
        }
  });
}

TEST_P(Collectives, reduce_gives_the_root_the_result) {
  run([&](Group& group) {
    each_dtype_and_op([&](DType dtype, ReduceOp op) {
      const size_t count = 3001;
      const int root = static_cast<int>(op) % size();
      const Array input(group, kind(), count * size_of(dtype));
      const Array output(group, kind(), count * size_of(dtype));
      fill(dtype, input.data(), group.rank(), count);
      group.run({.operation = Operation::kReduce,
                 .input = input.data(),
                 .output = group.rank() == root ? output.data() : nullptr,
                 .count = count,
                 .dtype = dtype,
                 .op = op,
                 .root = root});
      if (group.rank() == root) {
        EXPECT_TRUE(same(output.data(), expected_reduction(dtype, op, size(), count), name_of(dtype, op, count, root)));
      }
    });
    for (const size_t count : kCounts) {
      const Array data(group, kind(), count * 4);
      fill(DType::kFloat32, data.data(), group.rank(), count);
      group.run({.operation = Operation::kReduce, .input = data.data(), .output = data.data(), .count = count});
      if (group.rank() == 0) {
        EXPECT_TRUE(same(data.data(), expected_reduction(DType::kFloat32, ReduceOp::kSum, size(), count), "in place"));
      }
    }
  });
}

std::vector<size_t> uneven_counts(int size, size_t scale) {
  std::vector<size_t> counts;
  for (int rank = 0; rank < size; ++rank) counts.push_back(static_cast<unsigned>((rank * 5 + 2) % 4) * scale);
  return counts;
}

size_t sum_of(const std::vector<size_t>& counts, int first) {
  return std::accumulate(counts.begin(), counts.begin() + first, size_t{0});
}

void check_reduce_scatter(Group& group, MemoryKind kind, DType dtype, const std::vector<size_t>& counts, bool even) {
  const size_t total = sum_of(counts, group.size());
  const size_t mine = counts[static_cast<unsigned>(group.rank())];
  const Array input(group, kind, total * size_of(dtype));
  const Array output(group, kind, mine * size_of(dtype));
  fill(dtype, input.data(), group.rank(), total);
  group.run({.operation = Operation::kReduceScatter,
             .input = input.data(),
             .output = output.data(),
             .count = even ? mine : 0,
             .counts = even ? std::vector<size_t>{} : counts,
             .dtype = dtype});
  const std::vector<std::byte> all = expected_reduction(dtype, ReduceOp::kSum, group.size(), total);
  const auto begin = all.begin() + static_cast<ptrdiff_t>(sum_of(counts, group.rank()) * size_of(dtype));
  const std::vector<std::byte> part(begin, begin + static_cast<ptrdiff_t>(mine * size_of(dtype)));
  EXPECT_TRUE(same(output.data(), part, "reduce_scatter"));
}

TEST_P(Collectives, reduce_scatter_gives_each_rank_its_part) {
  run([&](Group& group) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kUInt8})
      for (const size_t count : {0, 1, 33, 1000, 5003}) {
        check_reduce_scatter(group, kind(), dtype, std::vector<size_t>(static_cast<unsigned>(size()), count), true);
        check_reduce_scatter(group, kind(), dtype, uneven_counts(size(), count), false);
      }
  });
}

std::vector<std::byte> gathered(DType dtype, const std::vector<size_t>& counts) {
  std::vector<std::byte> all(sum_of(counts, static_cast<int>(counts.size())) * size_of(dtype));
  std::byte* at = all.data();
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    fill(dtype, at, static_cast<int>(rank), counts[rank]);
    at += counts[rank] * size_of(dtype);
  }
  return all;
}

void check_gathers(Group& group, MemoryKind kind, const std::vector<size_t>& counts, bool even) {
  const DType dtype = DType::kInt32;
  const size_t mine = counts[static_cast<unsigned>(group.rank())];
  const size_t total = sum_of(counts, group.size());
  const std::vector<size_t> uneven = even ? std::vector<size_t>{} : counts;
  const Array input(group, kind, mine * 4);
  fill(dtype, input.data(), group.rank(), mine);
  const Array all(group, kind, total * 4);
  group.run({.operation = Operation::kAllGather,
             .input = input.data(),
             .output = all.data(),
             .count = mine,
             .counts = uneven,
             .dtype = dtype});
  EXPECT_TRUE(same(all.data(), gathered(dtype, counts), "all_gather"));
  const int root = group.size() - 1;
  const Array at_root(group, kind, total * 4);
  group.run({.operation = Operation::kGather,
             .input = input.data(),
             .output = group.rank() == root ? at_root.data() : nullptr,
             .count = mine,
             .counts = uneven,
             .dtype = dtype,
             .root = root});
  if (group.rank() == root) {
    EXPECT_TRUE(same(at_root.data(), gathered(dtype, counts), "gather"));
  }
  const Array back(group, kind, mine * 4);
  group.run({.operation = Operation::kScatter,
             .input = group.rank() == root ? at_root.data() : nullptr,
             .output = back.data(),
             .count = mine,
             .counts = uneven,
             .dtype = dtype,
             .root = root});
  EXPECT_TRUE(same(back.data(), std::vector<std::byte>(input.data(), input.data() + mine * 4), "scatter"));
}

TEST_P(Collectives, gathers_and_scatters_move_every_part) {
  run([&](Group& group) {
    for (const size_t count : kCounts) {
      check_gathers(group, kind(), std::vector<size_t>(static_cast<unsigned>(size()), count), true);
      check_gathers(group, kind(), uneven_counts(size(), count), false);
    }
  });
}

TEST_P(Collectives, broadcast_gives_every_rank_the_roots_data) {
  run([&](Group& group) {
    for (int root = 0; root < size(); ++root)
      for (const size_t count : kCounts) {
        const Array data(group, kind(), count * 2);
        if (group.rank() == root) fill(DType::kInt16, data.data(), root, count);
        group.run({.operation = Operation::kBroadcast,
                   .output = data.data(),
                   .count = count,
                   .dtype = DType::kInt16,
                   .root = root});
        std::vector<std::byte> expected(count * 2);
        fill(DType::kInt16, expected.data(), root, count);
        EXPECT_TRUE(same(data.data(), expected, "broadcast"));
      }
  });
}

// Rank a sends (a + 2 b) % 4 * scale elements to rank b; each is a * 1000 + b * 10 + index % 7.
size_t message_count(int from, int to, size_t scale) { return static_cast<unsigned>((from + 2 * to) % 4) * scale; }
int64_t message_value(int from, int to, size_t index) {
  return from * 1000 + to * 10 + static_cast<int64_t>(index % 7);
}

void check_all_to_all(Group& group, MemoryKind kind, size_t scale, bool even) {
  std::vector<size_t> sends;
  std::vector<size_t> receives;
  for (int peer = 0; peer < group.size(); ++peer) {
    sends.push_back(even ? scale : message_count(group.rank(), peer, scale));
    receives.push_back(even ? scale : message_count(peer, group.rank(), scale));
  }
  const Array input(group, kind, sum_of(sends, group.size()) * 8);
  const Array output(group, kind, sum_of(receives, group.size()) * 8);
  std::vector<std::byte> expected(sum_of(receives, group.size()) * 8);
  for (int peer = 0; peer < group.size(); ++peer) {
    for (size_t i = 0; i < sends[static_cast<unsigned>(peer)]; ++i)
      put(input.data(), sum_of(sends, peer) + i, message_value(group.rank(), peer, i));
    for (size_t i = 0; i < receives[static_cast<unsigned>(peer)]; ++i)
      put(expected.data(), sum_of(receives, peer) + i, message_value(peer, group.rank(), i));
  }
  group.run({.operation = Operation::kAllToAll,
             .input = input.data(),
             .output = output.data(),
             .count = scale,
             .counts = even ? std::vector<size_t>{} : sends,
             .receive_counts = even ? std::vector<size_t>{} : receives,
             .dtype = DType::kInt64});
  EXPECT_TRUE(same(output.data(), expected, "all_to_all"));
}

TEST_P(Collectives, all_to_all_gives_each_rank_its_message_from_each) {
  run([&](Group& group) {
    for (const size_t scale : {0, 1, 100, 3001}) {
      check_all_to_all(group, kind(), scale, true);
      check_all_to_all(group, kind(), scale, false);
    }
  });
}

TEST(collectives, all_reduce_into_one_shared_result) {
  expect_none(run_threads(
      3,
      [](Group& group) {
        const size_t count = 10000;
        Memory memory = group.allocate(2 * count * 4);
        uint64_t offset = memory.offset() + count * 4;
        group.run({.operation = Operation::kBroadcast, .output = &offset, .count = 1, .dtype = DType::kInt64});
        std::byte* const result = group.peer_memory(0, offset, count * 4);
        fill(DType::kFloat32, memory.data(), group.rank(), count);
        group.run({.operation = Operation::kAllReduce, .input = memory.data(), .output = result, .count = count});
        EXPECT_TRUE(same(result, expected_reduction(DType::kFloat32, ReduceOp::kSum, 3, count), "shared result"));
        group.barrier();
      },
      options_for(MemoryKind::kArena)));
}

// More bytes than 31 bits count, in ordinary memory and in memory that peers reach.
TEST(collectives, reduce_more_than_2_gib) {
  constexpr size_t kBytes = LOCKSTEP_TEST_PATIENCE > 1 ? 1 << 24 : (size_t{1} << 31) + 4099;
  for (const MemoryKind kind : {MemoryKind::kOrdinary, MemoryKind::kArena}) {
    const auto codes = testing::run_processes(
        2,
        [&](Group& group) {
          const Array array(group, kind, kBytes);
          std::fill_n(array.data(), kBytes, static_cast<std::byte>(1 + group.rank()));
          array.data()[kBytes - 1] = array.data()[kBytes / 2] = std::byte{20};
          group.run({.operation = Operation::kAllReduce,
                     .input = array.data(),
                     .output = array.data(),
                     .count = kBytes,
                     .dtype = DType::kUInt8});
          const bool ends_well = array.data()[kBytes - 1] == std::byte{40} && array.data()[kBytes / 2] == std::byte{40};
          return ends_well && std::count(array.data(), array.data() + kBytes, std::byte{3}) == kBytes - 2 ? 0 : 1;
        },
        {.timeout = std::chrono::minutes(2)});
    EXPECT_EQ(codes, std::vector<int>(2, 0));
  }
}

}  // namespace
}  // namespace lockstep::shm
