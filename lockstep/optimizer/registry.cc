// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/optimizers.h"

namespace lockstep {
namespace {

// One per alternative of OptimizerOptions; a missing one does not compile.
template <class Options>
struct Entry;

template <>
struct Entry<SGDOptions> {
  using Type = SGD;
  static constexpr const char* kName = "sgd";
  static void visit(auto& options, const auto& option) {
    option("lr", options.lr);
    option("momentum", options.momentum);
    option("nesterov", options.nesterov);
    option("weight_decay", options.weight_decay);
  }
};

struct AdamFields {
  static void visit(auto& options, const auto& option) {
    option("lr", options.lr);
    option("beta1", options.beta1);
    option("beta2", options.beta2);
    option("eps", options.eps);
    option("weight_decay", options.weight_decay);
  }
};

template <>
struct Entry<AdamOptions> : AdamFields {
  using Type = Adam;
  static constexpr const char* kName = "adam";
};

template <>
struct Entry<AdamWOptions> : AdamFields {
  using Type = AdamW;
  static constexpr const char* kName = "adamw";
};

template <>
struct Entry<LAMBOptions> : AdamFields {
  using Type = LAMB;
  static constexpr const char* kName = "lamb";
};

template <>
struct Entry<LARSOptions> {
  using Type = LARS;
  static constexpr const char* kName = "lars";
  static void visit(auto& options, const auto& option) {
    option("lr", options.lr);
    option("momentum", options.momentum);
    option("weight_decay", options.weight_decay);
    option("trust", options.trust);
  }
};

template <std::size_t... i>
std::vector<OptimizerOptions> defaults(std::index_sequence<i...>) {
  return {std::variant_alternative_t<i, OptimizerOptions>{}...};
}

const std::vector<OptimizerOptions>& all_defaults() {
  static const auto all = defaults(std::make_index_sequence<std::variant_size_v<OptimizerOptions>>());
  return all;
}

}  // namespace

std::shared_ptr<Optimizer> make_optimizer(std::vector<torch::Tensor> parameters, const OptimizerOptions& options) {
  return std::visit(
      [&]<class Options>(const Options& values) -> std::shared_ptr<Optimizer> {
        return std::make_shared<typename Entry<Options>::Type>(std::move(parameters), values);
      },
      options);
}

std::string name_of(const OptimizerOptions& options) {
  return std::visit([]<class Options>(const Options&) { return Entry<Options>::kName; }, options);
}

// Asked of the rule itself, so that nobody has to list it a second time.
bool layerwise(const OptimizerOptions& options) { return make_optimizer({}, options)->layerwise(); }

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const OptimizerOptions& each : all_defaults()) all.push_back(name_of(each));
    return all;
  }();
  return names;
}

OptionValues values_of(const OptimizerOptions& options) {
  OptionValues values;
  std::visit(
      [&]<class Options>(const Options& from) {
        Entry<Options>::visit(from, [&](const char* name, auto value) { values[name] = static_cast<double>(value); });
      },
      options);
  return values;
}

OptionValues values_of(const torch::optim::OptimizerOptions& options) {
  OptionValues values{{"lr", options.get_lr()}};
  const auto take = [&]<class Options>(const Options&) {
    if (const auto* group = dynamic_cast<const GroupOptions<Options>*>(&options)) values = values_of(group->values);
  };
  for (const OptimizerOptions& each : all_defaults()) std::visit(take, each);
  return values;
}

OptimizerOptions optimizer_options(const std::string& name, const OptionValues& values) {
  for (OptimizerOptions options : all_defaults()) {
    if (name_of(options) != name) continue;
    std::visit(
        [&]<class Options>(Options& into) {
          Entry<Options>::visit(into, [&]<class Value>(const char* option, Value& value) {
            if (const auto found = values.find(option); found != values.end())
              value = static_cast<Value>(found->second);
          });
        },
        options);
    return options;
  }
  throw UsageError({.what = concat("no such optimizer: ", name), .next = join(optimizer_names(), ", ")});
}

}  // namespace lockstep
