// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/partial_model.h"

#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <ATen/CPUGeneratorImpl.h>

#include "lockstep/error.h"
#include "lockstep/model/allocation_meter.h"
#include "lockstep/model/parameters.h"
#include "lockstep/models.h"

namespace lockstep {
namespace {

// The parameters of the first of `parts` parts.
Tensors first_part(torch::nn::Module& model, size_t parts) {
  Tensors wanted = model.parameters();
  wanted.resize(wanted.size() / parts);
  return wanted;
}

void expect_part_of(const std::function<ModulePtr()>& make) {
  torch::manual_seed(5);
  const ModulePtr whole = make();
  const torch::Tensor next = torch::rand({4});
  const ModulePtr part = PartialModel(make).make_part(5, [](auto& model) { return first_part(model, 2); });
  EXPECT_TRUE(torch::equal(torch::rand({4}), next)) << "the generator is not where it would be";
  const auto expected = named_parameters(*whole), found = named_parameters(*part);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].name, expected[i].name);
    EXPECT_EQ(found[i].tensor.sizes(), expected[i].tensor.sizes());
    EXPECT_EQ(found[i].tensor.strides(), expected[i].tensor.strides());
    EXPECT_EQ(found[i].tensor.dtype(), expected[i].tensor.dtype());
    EXPECT_EQ(found[i].tensor.requires_grad(), expected[i].tensor.requires_grad());
    ASSERT_EQ(is_held(found[i].tensor), i < found.size() / 2) << found[i].name;
    EXPECT_TRUE(!is_held(found[i].tensor) || torch::equal(found[i].tensor, expected[i].tensor)) << found[i].name;
  }
}

TEST(PartialModel, has_the_values_of_the_whole_model) {
  for (const char* name : {"lenet", "mlp", "inception", "resnet18-32", "gpt-mini"}) {
    SCOPED_TRACE(name);
    expect_part_of(model_task(name).make_model);
  }
}

TEST(PartialModel, can_be_of_another_dtype) {
  expect_part_of([] {
    ModulePtr model = model_task("gpt-mini").make_model();
    model->to(torch::kFloat64);
    return model;
  });
}

// One layer after the other, each computed from the one before: the part needs the first half, and what comes of it.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(bool reads_values) {
    torch::Tensor weight = torch::randn({64, 64}) * 0.1;
    for (int i = 0; i < 4; ++i) {
      register_parameter("weight" + std::to_string(i), weight);
      if (reads_values && weight.abs().max().item<double>() > 1e6) weight = torch::zeros({64, 64});
      weight = torch::mm(weight, weight) + torch::bernoulli(torch::full({64, 64}, 0.5));
      weight = weight.detach();
    }
    table = torch::linspace(0, 1, 5000);
  }
  torch::Tensor table;  // neither parameter nor buffer
};

TEST(PartialModel, keeps_what_its_values_are_computed_from) {
  expect_part_of([] { return std::make_shared<ChainImpl>(false); });
}

TEST(PartialModel, keeps_tensors_that_are_neither_parameters_nor_buffers) {
  const PartialModel partial([] { return std::make_shared<ChainImpl>(false); });
  const ModulePtr part = partial.make_part(5, [](auto&) { return Tensors(); });
  EXPECT_TRUE(torch::equal(dynamic_cast<ChainImpl&>(*part).table, torch::linspace(0, 1, 5000)));
}

TEST(PartialModel, is_right_where_making_it_reads_values) {
  expect_part_of([] { return std::make_shared<ChainImpl>(true); });
}

TEST(PartialModel, has_orthogonal_weights) {
  expect_part_of([] {
    torch::nn::Sequential net(torch::nn::Linear(40, 50), torch::nn::Linear(50, 60), torch::nn::Linear(60, 70),
                              torch::nn::Linear(70, 80));
    for (torch::Tensor& weight : net->parameters())
      if (weight.dim() == 2) torch::nn::init::orthogonal_(weight);
    return net.ptr();
  });
}

TEST(PartialModel, holds_a_tied_layer_under_both_names) {
  const auto make = [] {
    const torch::nn::Linear tied(40, 40);
    return torch::nn::Sequential(tied, torch::nn::Linear(40, 40), tied).ptr();
  };
  const ModulePtr part =
      PartialModel(make).make_part(1, [](auto& model) { return Tensors{model.named_parameters()["0.weight"]}; });
  EXPECT_TRUE(is_held(part->named_parameters()["2.weight"]));
  EXPECT_FALSE(is_held(part->named_parameters()["1.weight"]));
}

TEST(PartialModel, never_has_two_tensors_of_others_in_memory) {
  constexpr int64_t kLayer = 300 * 300 * 4;  // bytes
  const auto make = [] {
    torch::nn::Sequential net;
    for (int i = 0; i < 20; ++i) net->push_back(torch::nn::Linear(torch::nn::LinearOptions(300, 300).bias(false)));
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& weight : net->parameters()) weight.normal_(0, 0.02);
    return net.ptr();
  };
  const AllocationMeter meter;
  const ModulePtr part = PartialModel(make).make_part(1, [](auto& model) { return first_part(model, 10); });
  EXPECT_EQ(meter.now(), 2 * kLayer);
  EXPECT_LT(meter.most(), 2 * kLayer + 2 * kLayer);
}

TEST(PartialModel, throws_what_making_it_throws) {
  EXPECT_THROW(PartialModel([]() -> ModulePtr { throw DataError({.what = "no such model"}); }), DataError);
}

TEST(PutData, gives_and_frees_the_memory_of_a_parameter_everywhere) {
  torch::nn::Linear layer(3, 4);
  const torch::Tensor other = layer->weight;
  put_data(layer->weight, on_meta(layer->weight));
  EXPECT_FALSE(is_held(other));
  put_data(other, torch::ones({4, 3}));
  layer(torch::ones({1, 3})).sum().backward();
  EXPECT_TRUE(torch::equal(layer->parameters()[0].grad(), torch::ones({4, 3})));
}

}  // namespace
}  // namespace lockstep
