// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/optimizer/rule.h"

namespace lockstep {
namespace {

constexpr std::array kOptimizerNames = {"sgd", "adam", "adamw", "lamb", "lars"};  // in the order of OptimizerOptions
static_assert(kOptimizerNames.size() == std::variant_size_v<OptimizerOptions>);

// Calls option(name, field) for every field that these options have.
void visit_fields(auto& options, const auto& option) {
  option("lr", options.lr);
  option("weight_decay", options.weight_decay);
  if constexpr (requires { options.momentum; }) option("momentum", options.momentum);
  if constexpr (requires { options.nesterov; }) option("nesterov", options.nesterov);
  if constexpr (requires { options.trust; }) option("trust", options.trust);
  if constexpr (requires { options.beta1; }) option("beta1", options.beta1);
  if constexpr (requires { options.beta2; }) option("beta2", options.beta2);
  if constexpr (requires { options.eps; }) option("eps", options.eps);
}

// The default options of optimizer number `index`.
template <std::size_t... i>
OptimizerOptions defaults_of(std::size_t index, std::index_sequence<i...>) {
  return std::array{OptimizerOptions(std::in_place_index<i>)...}[index];
}

// Calls option(name, field) for every field. Returns whether these are options of lockstep's.
template <std::size_t... i>
bool visit_if_of_a_kind(torch::optim::OptimizerOptions& options, const auto& option, std::index_sequence<i...>) {
  const auto visit_if = [&]<class Options>(std::type_identity<Options>) {
    auto* const group = dynamic_cast<GroupOptions<Options>*>(&options);
    if (group != nullptr) visit_fields(group->values, option);
    return group != nullptr;
  };
  return (visit_if(std::type_identity<std::variant_alternative_t<i, OptimizerOptions>>()) || ...);
}

constexpr auto kAllKinds = std::make_index_sequence<kOptimizerNames.size()>();

}  // namespace

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names(kOptimizerNames.begin(), kOptimizerNames.end());
  return names;
}

std::string name_of(const OptimizerOptions& options) { return kOptimizerNames[options.index()]; }

std::shared_ptr<Optimizer> make_optimizer(std::vector<torch::Tensor> parameters, const OptimizerOptions& options) {
  return std::visit(
      [&]<class Options>(const Options& values) -> std::shared_ptr<Optimizer> {
        return std::make_shared<OptimizerWith<Options>>(std::move(parameters), values);
      },
      options);
}

// Asked of the rule itself, so that nobody has to list it a second time.
bool layerwise(const OptimizerOptions& options) {
  return std::visit([](const auto& values) { return rule_of(values)->layerwise(); }, options);
}

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
  const auto tell = [&](const char* name, auto value) { option(name, static_cast<double>(value)); };
  auto& same = const_cast<torch::optim::OptimizerOptions&>(options);  // which nothing here writes to
  if (!visit_if_of_a_kind(same, tell, kAllKinds)) option("lr", options.get_lr());
}

void set_options(torch::optim::OptimizerOptions& options, const OptionValues& values) {
  const auto set = [&]<class Value>(const char* name, Value& value) {
    if (const auto given = values.find(name); given != values.end()) value = static_cast<Value>(given->second);
  };
  if (!visit_if_of_a_kind(options, set, kAllKinds) && values.contains("lr")) options.set_lr(values.at("lr"));
}

OptimizerOptions optimizer_options(const std::string& name, const OptionValues& values) {
  const auto& names = optimizer_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) throw UsageError({.what = concat("no such optimizer: ", name), .next = join(names, ", ")});
  OptimizerOptions options = defaults_of(found - names.begin(), kAllKinds);
  const auto set = [&]<class Value>(const char* option, Value& value) {
    if (const auto given = values.find(option); given != values.end()) value = static_cast<Value>(given->second);
  };
  std::visit([&](auto& into) { visit_fields(into, set); }, options);
  return options;
}

void require_valid(const OptimizerOptions& options) {
  for (const auto& [name, value] : values_of(options)) {
    const bool too_large = name.starts_with("beta") && value >= 1;
    const bool too_small = name == "trust" && value == 0;
    if (value >= 0 && !too_large && !too_small) continue;
    throw UsageError({.what = concat(name_of(options), " with ", name, ' ', value),
                      .likely = "a negative value, a beta outside [0, 1), or no trust"});
  }
  const auto* sgd = std::get_if<SGDOptions>(&options);
  if (sgd != nullptr && sgd->nesterov && sgd->momentum == 0)
    throw UsageError({.what = "SGD with nesterov, but momentum 0",
                      .likely = "--nesterov without --momentum",
                      .next = "give a momentum such as 0.9"});
}

}  // namespace lockstep
