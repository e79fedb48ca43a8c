// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>

#include "lockstep/base/names.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/step/update/rule.h"

namespace lockstep {
namespace {

struct Known {
  const char* name;
  OptimizerOptions defaults;
};
const Known kKnown[] = {{"sgd", SGDOptions{}},        {"adam", AdamOptions{}}, {"adamw", AdamWOptions{}},
                        {"lamb", LAMBOptions{}},      {"lars", LARSOptions{}}, {"rmsprop", RMSpropOptions{}},
                        {"adagrad", AdagradOptions{}}};  // in the order of OptimizerOptions
static_assert(std::size(kKnown) == std::variant_size_v<OptimizerOptions>);

// Calls option(name, field) for every field that these options have.
void visit_fields(auto& options, const auto& option) {
  option("lr", options.lr);
  option("weight_decay", options.weight_decay);
  if constexpr (requires { options.momentum; }) option("momentum", options.momentum);
  if constexpr (requires { options.nesterov; }) option("nesterov", options.nesterov);
  if constexpr (requires { options.trust; }) option("trust", options.trust);
  if constexpr (requires { options.beta1; }) option("beta1", options.beta1);
  if constexpr (requires { options.beta2; }) option("beta2", options.beta2);
  if constexpr (requires { options.alpha; }) option("alpha", options.alpha);
  if constexpr (requires { options.lr_decay; }) option("lr_decay", options.lr_decay);
  if constexpr (requires { options.eps; }) option("eps", options.eps);
}

// Sets those of the values that the options have.
void set_fields(auto& options, const OptionValues& values) {
  visit_fields(options, [&]<class Field>(const char* name, Field& field) {
    if (const auto given = values.find(name); given != values.end()) field = static_cast<Field>(given->second);
  });
}

// Calls visit() with the options of a parameter group, if they are of one of lockstep's optimizers. Returns whether they are.
bool visit_own(torch::optim::OptimizerOptions& options, const auto& visit) {
  return std::ranges::any_of(kKnown, [&](const Known& known) {
    return std::visit(
        [&]<class Options>(const Options&) {
          auto* const group = dynamic_cast<GroupOptions<Options>*>(&options);
          if (group != nullptr) visit(group->values);
          return group != nullptr;
        },
        known.defaults);
  });
}

}  // namespace

std::vector<std::string> optimizer_names() { return names_in(kKnown); }

std::string name_of(const OptimizerOptions& options) { return kKnown[options.index()].name; }

std::shared_ptr<Optimizer> make_optimizer(Tensors parameters, const OptimizerOptions& options) {
  return std::visit(
      [&]<class Options>(const Options& values) -> std::shared_ptr<Optimizer> {
        return std::make_shared<OptimizerWith<Options>>(std::move(parameters), values);
      },
      options);
}

bool layerwise(const OptimizerOptions& options) { return rule_of(options)->layerwise(); }

OptionValues values_of(const OptimizerOptions& options) {
  OptionValues values;
  const auto note = [&](const char* name, auto value) { values[name] = static_cast<double>(value); };
  std::visit([&](const auto& from) { visit_fields(from, note); }, options);
  return values;
}

OptionValues values_of(const torch::optim::OptimizerOptions& options) {
  OptionValues values;
  visit_options(options, [&](const char* name, double value) { values[name] = value; });
  return values;
}

void visit_options(const torch::optim::OptimizerOptions& options,
                   const std::function<void(const char* name, double value)>& option) {
  const auto own = own_options(options);
  if (!own) return option("lr", options.get_lr());
  const auto visit = [&](const char* name, auto value) { option(name, static_cast<double>(value)); };
  std::visit([&](const auto& values) { visit_fields(values, visit); }, *own);
}

void set_options(torch::optim::OptimizerOptions& options, const OptionValues& values) {
  const bool is_own = visit_own(options, [&](auto& own) { set_fields(own, values); });
  if (!is_own && values.contains("lr")) options.set_lr(values.at("lr"));
}

std::optional<OptimizerOptions> own_options(const torch::optim::OptimizerOptions& options) {
  std::optional<OptimizerOptions> own;
  auto& same = const_cast<torch::optim::OptimizerOptions&>(options);  // nothing here writes to it
  visit_own(same, [&](const auto& values) { own = values; });
  return own;
}

std::unique_ptr<UpdateRule> rule_of(const OptimizerOptions& options) {
  return std::visit([](const auto& values) { return rule_of(values); }, options);
}

OptimizerOptions optimizer_options(const std::string& name, const OptionValues& values) {
  OptimizerOptions options = row_named(kKnown, name, "optimizer").defaults;
  std::visit([&](auto& into) { set_fields(into, values); }, options);
  return options;
}

void require_momentum(bool is_kept) {
  if (!is_kept)
    throw UsageError({.what = "a parameter group sets momentum, but the optimizer was made with momentum 0",
                      .next = "make the optimizer with momentum, and the group that needs none with momentum 0"});
}

void require_valid(const OptimizerOptions& options) {
  for (const auto& [name, value] : values_of(options)) {
    const bool too_large = (name.starts_with("beta") || name == "alpha") && value >= 1;
    const bool too_small = name == "trust" && value == 0;
    if (value >= 0 && !too_large && !too_small) continue;
    throw UsageError({.what = concat(name_of(options), " with ", name, ' ', value),
                      .likely = "a negative value, a beta or alpha outside [0, 1), or a trust of 0"});
  }
  const auto* sgd = std::get_if<SGDOptions>(&options);
  if (sgd != nullptr && sgd->nesterov && sgd->momentum == 0)
    throw UsageError({.what = "SGD with nesterov, but momentum 0",
                      .likely = "--nesterov without --momentum",
                      .next = "give a momentum such as 0.9"});
}

}  // namespace lockstep
