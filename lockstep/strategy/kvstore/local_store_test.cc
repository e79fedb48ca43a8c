// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/kvstore/local_store.h"

#include <map>

#include "lockstep/model/parameters.h"
#include "lockstep/models.h"
#include "lockstep/strategy/option_names.h"
#include "tests/strategies.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using namespace testing;

StrategyOptions local(const std::string& kind, int devices) {
  return {.kind = StrategyKind::kKVStore,
          .optimizer = SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true},
          .seed = 4,
          .devices = devices,
          .kvstore = {.kind = value_named<KVStoreKind>(kind, "--kvstore")}};
}

class LocalKindOfSize : public ::testing::TestWithParam<std::tuple<const char*, int>> {};
INSTANTIATE_TEST_SUITE_P(Kinds, LocalKindOfSize,
                         ::testing::Combine(::testing::Values("local", "local_update_cpu", "local_allreduce_cpu",
                                                              "local_allreduce_device"),
                                            ::testing::Values(1, 2, 3, 4)));

TEST_P(LocalKindOfSize, trains_as_one_device_does) {
  const auto [kind, devices] = GetParam();
  expect_same_course(course_of(small_task(), local(kind, devices)), on_one_device(small_task(), local(kind, devices)));
}

TEST_P(LocalKindOfSize, takes_b_over_k_examples_per_device_and_b_per_update_without_delay) {
  const auto [kind, devices] = GetParam();
  const auto strategy = strategy_of(small_task(), local(kind, devices));
  course_of(*strategy, 3, 12);
  const Report report = strategy->report();
  std::map<std::string, double> numbers(report.begin(), report.end());
  EXPECT_EQ(numbers["examples_per_device"], 12.0 / devices);
  EXPECT_EQ(numbers["examples_per_update"], 12);
  EXPECT_EQ(numbers["max_delay"], 0);
  EXPECT_EQ(numbers["updates"], 3);
  EXPECT_TRUE(contains(strategy->table(), "examples per update"));
}

TEST_P(LocalKindOfSize, goes_on_from_a_checkpoint_with_the_same_bits) {
  const auto [kind, devices] = GetParam();
  const auto whole = strategy_of(small_task(), local(kind, devices));
  const Course course = course_of(*whole);
  const auto before = strategy_of(small_task(), local(kind, devices));
  course_of(*before, 7);
  const auto after = strategy_of(small_task(), local(kind, devices));
  const auto from = before->model().parameters();
  const auto into = after->model().parameters();
  for (size_t i = 0; i < from.size(); ++i) {
    const torch::NoGradGuard no_grad;
    torch::Tensor(into[i]).copy_(from[i]);
    after->optimizer().set_state(into[i], before->optimizer().state_of(from[i]));
  }
  after->restored(7);
  for (int step = 7; step < kSteps; ++step) {
    after->forward_backward(batch_of(step));
    after->update();
  }
  expect_same_bits({values_of(after->model()), {}}, {course.parameters, {}});
}

TEST(LocalKind, chooses_by_links_and_by_the_largest_weight_and_says_why) {
  const auto lenet = named_parameters(*model_task("lenet").make_model());
  const auto alexnet = named_parameters(*model_task("alexnet").make_model());
  const auto expect = [](const ChosenKind& choice, KVStoreKind kind, const std::string& reason) {
    EXPECT_EQ(choice.kind, kind) << choice.reason;
    EXPECT_TRUE(contains(choice.reason, reason));
  };
  expect(choose_local_kind(alexnet, 1), KVStoreKind::kLocalUpdateCpu, "one device");
  expect(choose_local_kind(alexnet, 2), KVStoreKind::kLocalUpdateCpu, "devices that are cores");
  expect(choose_local_kind(lenet, 2, ""), KVStoreKind::kLocalAllReduceDevice, "all devices reach");
  const std::string separate = "cuda:0 and cuda:1";
  expect(choose_local_kind(lenet, 2, separate), KVStoreKind::kLocalUpdateCpu, "cuda:0 and cuda:1 don't reach");
  expect(choose_local_kind(alexnet, 2, separate), KVStoreKind::kLocalAllReduceCpu, "37,748,736 elements");
}

// The store by itself.

TEST(LocalStore, sums_what_devices_push_and_gives_the_sum_to_all) {
  Devices devices({.count = 2});
  for (const KVStoreKind kind : {KVStoreKind::kLocalAllReduceCpu, KVStoreKind::kLocalAllReduceDevice}) {
    LocalStore store(kind, &devices);
    store.init({{"a", torch::zeros({2, 3})}, {"b", torch::zeros({4})}});
    store.push({"b"}, {{torch::full({4}, 1.0F)}, {torch::full({4}, 2.0F)}});
    const DeviceTensors into{{torch::ones({2, 3}), torch::zeros({4})}, {torch::ones({2, 3}), torch::zeros({4})}};
    store.pull({"a", "b"}, into);
    for (const auto& device : into) {
      EXPECT_TRUE(torch::equal(device[0], torch::zeros({2, 3})));
      EXPECT_TRUE(torch::equal(device[1], torch::full({4}, 3.0F)));
    }
  }
}

TEST(LocalStore, updates_with_an_optimizer_and_pulls_rows) {
  LocalStore store(KVStoreKind::kLocal, nullptr);
  store.init({{"table", torch::arange(8, torch::kFloat32).view({4, 2})}}, {{"plain", torch::zeros({1})}});
  store.set_optimizer({.optimizer = SGDOptions{.lr = 0.5}});
  const torch::Tensor into = torch::zeros({4, 2});
  store.push_pull({"table"}, {{torch::full({4, 2}, 2.0F)}}, {{into}});
  EXPECT_TRUE(torch::equal(into, torch::arange(8, torch::kFloat32).view({4, 2}) - 1));
  store.push({"table"}, {{torch::full({4, 2}, 2.0F)}}, {.learning_rate = 2});
  EXPECT_TRUE(torch::equal(store.row_sparse_pull("table", torch::tensor({3, 0})),
                           torch::tensor({{1.0F, 2.0F}, {-5.0F, -4.0F}})));
  store.push({"plain"}, {{torch::full({1}, 7.0F)}});
  store.pull({"plain"}, {{into[0].narrow(0, 0, 1)}});
  EXPECT_EQ(into[0][0].item<float>(), 7);
}

TEST(LocalStore, says_what_is_wrong) {
  LocalStore store(KVStoreKind::kLocal, nullptr);
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         store.init({{"a", torch::ones({1})}, {"a", torch::ones({1})}});
                       }),
                       "two values"));
  LocalStore good(KVStoreKind::kLocal, nullptr);
  good.init({{"a", torch::ones({2})}});
  EXPECT_TRUE(contains(message_of<UsageError>([&] { good.init({{"a", torch::ones({2})}}); }), "init()"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { good.pull({"b"}, {{torch::ones({2})}}); }), "no key b"));
  EXPECT_TRUE(contains(
      message_of<UsageError>([&] { static_cast<void>(good.row_sparse_pull("a", torch::tensor({2}))); }), "rows of a"));
}

TEST(KVStoreStrategy, refuses_invalid_options) {
  const auto refusal = [](const std::function<void(StrategyOptions&)>& change) {
    StrategyOptions options = local("local", 2);
    change(options);
    return message_of<UsageError>([&] { strategy_of(small_task(), options); });
  };
  EXPECT_TRUE(contains(refusal([](auto& o) { o.compression.kind = Compression::kTwoBit; }),
                       "--compression 2bit with kvstore local"));
  EXPECT_TRUE(
      contains(refusal([](auto& o) { o.kvstore = {.kind = KVStoreKind::kDistAsync, .update_on_kvstore = false}; }),
               "updates on its servers"));
  EXPECT_TRUE(contains(refusal([](auto& o) { o.kvstore.staleness = -1; }), "--staleness -1"));
  EXPECT_TRUE(contains(refusal([](auto& o) { o.kvstore.kind = KVStoreKind::kDistSync; }), "1 servers and 0 workers"));
}

}  // namespace
}  // namespace lockstep
