// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/builtin.h"

#include "lockstep/checkpoint.h"
#include "lockstep/models.h"
#include "tests/support.h"

namespace lockstep {
namespace {

using testing::contains;
using testing::message_of;
using testing::TempFolder;

Task small_gpt() { return gpt_task("gpt", {.vocabulary = 20, .context = 8, .layers = 2, .heads = 2, .width = 8}); }

// Names and shapes as transformers.GPT2LMHeadModel saves them.
TEST(Weights, are_those_of_hugging_face_for_gpt2) {
  const TempFolder folder;
  torch::manual_seed(1);
  const ModulePtr trained = small_gpt().make_model();
  TensorFile file;
  for (const auto& item : trained->named_parameters()) {
    std::string name = "transformer." + item.key();
    torch::Tensor value = item.value().detach();
    for (const auto& [here, there] : {std::pair(".c_attn", ".attn.c_attn"), std::pair(".attn_proj", ".attn.c_proj"),
                                      std::pair(".c_fc", ".mlp.c_fc"), std::pair(".mlp_proj", ".mlp.c_proj")})
      if (const auto at = name.find(here); at != std::string::npos) {
        name.replace(at, std::string(here).size(), there);
        if (value.dim() == 2) value = value.t().contiguous();
      }
    file.tensors[name] = value;
  }
  save_safetensors(folder / "model.safetensors", file);
  torch::manual_seed(2);
  const ModulePtr loaded = with_weights(small_gpt(), folder.file("model.safetensors")).make_model();
  const auto wanted = trained->named_parameters();
  for (const auto& item : loaded->named_parameters())
    EXPECT_TRUE(torch::equal(item.value(), wanted[item.key()])) << item.key();
}

TEST(Weights, of_another_dtype_are_converted_and_those_that_do_not_fit_stay) {
  const TempFolder folder;
  const Task task = model_task("mlp").fit({.sizes = {4}, .classes = 3});
  TensorFile file;
  file.tensors["module.layers.0.bias"] = torch::full({512}, 0.5, torch::kBFloat16);
  file.tensors["module.layers.2.weight"] = torch::zeros({7, 512});
  save_safetensors(folder / "w", file);
  torch::manual_seed(1);
  const auto plain = task.make_model()->named_parameters();
  torch::manual_seed(1);
  const auto loaded = with_weights(task, folder.file("w")).make_model()->named_parameters();
  EXPECT_TRUE(torch::equal(loaded["layers.0.bias"], torch::full({512}, 0.5)));
  EXPECT_TRUE(torch::equal(loaded["layers.2.weight"], plain["layers.2.weight"]));
}

TEST(Frozen, are_parameters_whose_names_match) {
  const Task task = model_task("mlp").fit({.sizes = {4}, .classes = 3});
  for (const auto& item : with_frozen(task, "^layers.[01]").make_model()->named_parameters())
    EXPECT_EQ(item.value().requires_grad(), item.key().starts_with("layers.2")) << item.key();
  EXPECT_TRUE(contains(message_of<UsageError>([&] { with_frozen(task, "("); }), "is not a regular expression"));
  const auto all = message_of<UsageError>([&] { with_frozen(task, "layers").make_model(); });
  EXPECT_TRUE(contains(all, "matches 6 of 6 parameters")) << all;
}

}  // namespace
}  // namespace lockstep
