// SPDX-License-Identifier: Apache-2.0
#include "lockstep/gradient/exchange_totals.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

constexpr std::uint64_t kBits = 0xfedc'ba98'7654'3211;

// The sums where `alike` ranks of `ranks` have these bits, and each of the others has `other`.
std::vector<double> sums_of(int ranks, int alike, std::uint64_t bits, std::uint64_t other) {
  const BitCounts counts(ranks);
  std::vector<double> mine, others;
  counts.append(bits, mine);
  counts.append(other, others);
  for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = alike * mine[i] + (ranks - alike) * others[i];
  return mine;
}

TEST(BitCounts, know_equal_bits_of_any_number_of_ranks) {
  for (const int ranks : {1, 2, 3, 4, 7, 8, 1448, 1449, 65'536, 1'000'000, 2'147'483'647}) {
    const auto sums = sums_of(ranks, ranks, kBits, 0);
    EXPECT_EQ(sums.size(), BitCounts(ranks).size());
    EXPECT_EQ(BitCounts(ranks).common(sums, ranks), kBits) << ranks;
  }
}

TEST(BitCounts, find_a_single_rank_that_differs_in_a_single_bit) {
  for (const int ranks : {2, 3, 4, 7, 1448, 1449, 65'536, 1'000'000, 2'147'483'647})
    for (int bit = 0; bit < 64; ++bit)
      EXPECT_FALSE(
          BitCounts(ranks).common(sums_of(ranks, ranks - 1, kBits, kBits ^ std::uint64_t{1} << bit), ranks).has_value())
          << ranks << " ranks, bit " << bit;
}

TEST(BitCounts, leave_out_ranks_that_have_added_none) {
  EXPECT_EQ(BitCounts(7).common(sums_of(7, 4, kBits, 0), 4), kBits);
  EXPECT_EQ(BitCounts(7).common(sums_of(7, 0, kBits, 0), 0), 0U);
  EXPECT_FALSE(BitCounts(7).common(sums_of(7, 4, kBits, 1), 4).has_value());
}

}  // namespace
}  // namespace lockstep
