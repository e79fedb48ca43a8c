// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/weights.h"

#include <memory>
#include <optional>
#include <regex>
#include <utility>

#include "agent/clusters/environment.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/checkpoint/shards.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"

namespace lockstep {
namespace {

// Names of GPT-2's layers here and in Hugging Face's files, which have their matrices as (in, out).
constexpr std::pair<std::string_view, std::string_view> kConv1D[] = {{".c_attn.", ".attn.c_attn."},
                                                                     {".attn_proj.", ".attn.c_proj."},
                                                                     {".c_fc.", ".mlp.c_fc."},
                                                                     {".mlp_proj.", ".mlp.c_proj."}};

// The tensor of the file that has this name there, perhaps within a model of its own name; nothing: there is none.
std::optional<torch::Tensor> tensor_in(const CheckpointReader& file, const std::string& name) {
  for (const char* prefix : {"", "model.", "module.", "transformer."})
    if (file.entries().contains(prefix + name)) return file.read(prefix + name);
  return std::nullopt;
}

std::optional<torch::Tensor> find_tensor(const CheckpointReader& file, const std::string& name) {
  for (const auto& [here, there] : kConv1D) {
    const std::size_t at = name.find(here);
    if (at == std::string::npos) continue;
    auto found = tensor_in(file, std::string(name).replace(at, here.size(), there));
    if (found) return found->dim() == 2 ? found->t() : *found;
  }
  return tensor_in(file, name);
}

// Returns the names of those that the file has not, or in another shape.
std::vector<std::string> load(const CheckpointReader& file, const std::vector<NamedTensor>& tensors) {
  const torch::NoGradGuard no_grad;
  std::vector<std::string> left;
  for (const auto& [name, tensor] : tensors) {
    const auto found = find_tensor(file, name);
    if (found && found->sizes() == tensor.sizes())
      torch::Tensor(tensor).copy_(*found);
    else
      left.push_back(name);
  }
  return left;
}

void report(const std::string& file, std::size_t all, const std::vector<std::string>& left) {
  constexpr std::size_t kMostNames = 8;
  if (left.size() == all)
    throw UsageError({.what = concat(file, " has none of the model's ", all, " tensors in its shape"),
                      .likely = "weights of another model",
                      .next = "choose the --model that the file is for"});
  std::vector<std::string> names = left;
  if (names.size() > kMostNames) names.resize(kMostNames);
  log_info(concat(all - left.size(), " of the model's ", all, " tensors are from ", file,
                  left.empty() ? "" : concat("; it does not have, in their shape: ", join(names, ", ")),
                  names.size() < left.size() ? ", ..." : ""));
}

}  // namespace

Task with_weights(Task task, const std::string& file) {
  const auto reader = std::make_shared<const CheckpointReader>(file, Checksum::kOptional);
  task.make_model = [make = std::move(task.make_model), reader, file,
                     says = std::make_shared<bool>(read_job_environment().rank == 0)] {
    ModulePtr model = make();
    const auto tensors = named_tensors(*model);
    const auto left = load(*reader, tensors);
    if (left.size() == tensors.size() || std::exchange(*says, false)) report(file, tensors.size(), left);
    return model;
  };
  return task;
}

Task with_frozen(Task task, const std::string& pattern) {
  std::regex names;
  try {
    names = pattern;
  } catch (const std::regex_error&) {
    throw UsageError(
        {.what = concat("--freeze ", pattern, " is not a regular expression"), .next = "such as '^layer[12]'"});
  }
  task.make_model = [make = std::move(task.make_model), names, pattern] {
    ModulePtr model = make();
    const auto parameters = named_parameters(*model);
    std::size_t frozen = 0;
    for (const auto& [name, tensor] : parameters) {
      if (!std::regex_search(name, names)) continue;
      torch::Tensor(tensor).set_requires_grad(false);
      ++frozen;
    }
    if (frozen > 0 && frozen < parameters.size()) return model;
    throw UsageError(
        {.what = concat("--freeze ", pattern, " matches ", frozen, " of ", parameters.size(), " parameters"),
         .here = concat("the first is ", parameters.front().name),
         .next = "match some of them, such as '^layer[12]'"});
  };
  return task;
}

}  // namespace lockstep
