// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/data_watch.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

class Watch : public ::testing::Test {
 protected:
  Watch() { watch_.watch({torch::Tensor(), first_, second_}); }

  torch::Tensor first_ = torch::ones({3, 4});
  torch::Tensor second_ = torch::ones({1000}).set_requires_grad(true);
  DataWatch watch_;
};

TEST_F(Watch, finds_nothing_where_nobody_wrote) {
  EXPECT_FALSE(watch_.changed());
  EXPECT_EQ(second_.data().sum().item<float>(), 1000);
  EXPECT_FALSE(watch_.changed());
}

TEST_F(Watch, finds_an_operation_on_the_whole_tensor) {
  second_.data().mul_(0.5);
  EXPECT_EQ(watch_.changed(), 2U);
}

TEST_F(Watch, finds_a_write_of_a_single_element) {
  first_.data()[2][3] = 7;
  EXPECT_EQ(watch_.changed(), 1U);
}

TEST_F(Watch, finds_a_write_through_a_view_of_the_tensor) {
  first_.view({12}).data().narrow(0, 11, 1).zero_();
  EXPECT_EQ(watch_.changed(), 1U);
}

TEST_F(Watch, finds_a_write_by_the_second_use_of_data) {
  EXPECT_EQ(first_.data().sum().item<float>(), 12);
  first_.data().clamp_(-1, 0.5);
  EXPECT_EQ(watch_.changed(), 1U);
}

TEST_F(Watch, accepts_a_write_that_changes_no_value) {
  first_.data().mul_(1);
  EXPECT_FALSE(watch_.changed());
}

TEST_F(Watch, forgets_a_write_when_it_watches_again) {
  first_.data().mul_(2);
  watch_.watch({first_});
  EXPECT_FALSE(watch_.changed());
}

TEST_F(Watch, leaves_tensors_alone_that_it_no_longer_watches) {
  watch_.watch({second_});
  first_.data().mul_(2);
  EXPECT_FALSE(watch_.changed());
}

TEST_F(Watch, serves_two_who_watch_the_same_tensor) {
  DataWatch other;
  other.watch({first_});
  first_.data().mul_(2);
  EXPECT_EQ(watch_.changed(), 1U);
  EXPECT_EQ(other.changed(), 0U);
}

}  // namespace
}  // namespace lockstep
