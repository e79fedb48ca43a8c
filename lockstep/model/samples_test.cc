// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/samples.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

class SamplesOf : public ::testing::TestWithParam<torch::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Widths, SamplesOf,
                         ::testing::Values(torch::kUInt8, torch::kFloat16, torch::kFloat32, torch::kFloat64,
                                           torch::kComplexDouble));

TEST_P(SamplesOf, show_an_operation_over_all_elements) {
  for (const int64_t count : {1, 3, 16, 100, 10'000}) {
    const torch::Tensor ones = torch::ones({count}, GetParam()), same = ones.clone(), twos = ones * 2;
    EXPECT_EQ(hash_of_samples(ones), hash_of_samples(same)) << count;
    EXPECT_NE(hash_of_samples(ones), hash_of_samples(twos)) << count;
    EXPECT_NE(hash_of_samples(ones, 1), hash_of_samples(ones, 2)) << count;
  }
}

TEST_P(SamplesOf, look_for_elements_that_are_not_zero) {
  const torch::Tensor rows = torch::zeros({100, 10}, GetParam());
  const uint64_t zero = hash_of_samples(rows);
  rows[50].fill_(1);
  const uint64_t one = hash_of_samples(rows);
  rows.mul_(2);
  EXPECT_NE(zero, one);
  EXPECT_NE(one, hash_of_samples(rows));
}

TEST(Samples, of_the_last_element_and_the_second_half_of_a_wide_one_count) {
  const torch::Tensor numbers = torch::ones({1000}), wide = torch::ones({1}, torch::kComplexDouble);
  const uint64_t before = hash_of_samples(numbers), real = hash_of_samples(wide);
  numbers[-1] = 2;
  torch::view_as_real(wide)[0][1] = 3;
  EXPECT_NE(hash_of_samples(numbers), before);
  EXPECT_NE(hash_of_samples(wide), real);
}

TEST(Samples, of_tensors_without_elements_in_a_row_are_the_seed) {
  for (const torch::Tensor& tensor :
       {torch::Tensor(), torch::zeros({0}), torch::ones({4, 4}).slice(1, 0, 2), torch::ones({2, 2}).to_sparse()})
    EXPECT_EQ(hash_of_samples(tensor, 7), 7U);
}

}  // namespace
}  // namespace lockstep
