// SPDX-License-Identifier: Apache-2.0
#include "lockstep/model/partial_model.h"

#include <ATen/core/ivalue.h>

#include <stdexcept>
#include <unordered_map>

#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/model/operator_handler.h"
#include "lockstep/model/parameters.h"

namespace lockstep {
namespace {

constexpr int64_t kSmall = 1024;  // elements: constants, which functions that make models also read

using Stack = OperatorHandler::Stack;

// `make` reads values that a meta tensor does not have, or is not deterministic.
struct NotApart : std::runtime_error {
  using std::runtime_error::runtime_error;
};

const void* storage_of(const Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool writes(const c10::OperatorHandle& op, size_t argument) {
  const auto* alias = op.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

template <class Change>
void for_each_tensor(Stack& stack, size_t from, const Change& change) {
  for (size_t i = from; i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) {
      Tensor tensor = stack[i].toTensor();
      change(tensor, i);
      stack[i] = tensor;
    } else if (stack[i].isTensorList()) {
      Tensors tensors = stack[i].toTensorVector();
      for (Tensor& each : tensors) change(each, i);
      stack[i] = c10::IValue(tensors);
    }
  }
}

// Sees every operator that a function calls on this thread while it runs.
class Construction : public OperatorHandler {
 public:
  // is_wanted(n): whether the n-th tensor that is made keeps its memory.
  explicit Construction(std::function<bool(int)> is_wanted, bool draws)
      : is_wanted_(std::move(is_wanted)), draws_(draws) {}

  ModulePtr run(const std::function<ModulePtr()>& make) {
    const OperatorHandlerGuard guard(*this);
    return make();
  }

  // The tensors that were made, in order. Their storages stay alive, so that no two have the same address.
  IntVector<c10::Storage> made;
  std::unordered_map<const void*, int> number_of;
  IntVector<std::vector<int>> sources;

  void call(const c10::OperatorHandle& op, Stack& stack) override {
    const size_t begin = stack.size() - op.schema().arguments().size();
    std::vector<int> inputs;
    bool any_meta = false;
    for_each_tensor(stack, begin, [&](const Tensor& tensor, size_t) {
      any_meta = any_meta || tensor.is_meta();
      if (const auto found = number_of.find(storage_of(tensor)); found != number_of.end())
        inputs.push_back(found->second);
    });
    note_writes(op, stack, begin, inputs);
    if (any_meta) prepare_for_meta(op, stack, begin);
    const std::set<const void*> given = storages_in(stack, begin);
    op.callBoxed(stack);
    for_each_tensor(stack, begin, [&](Tensor& result, size_t) {
      if (!given.contains(storage_of(result))) note(result, inputs);
    });
  }

 private:
  // Notes that a tensor that an operator writes into depends on its other inputs from now on.
  void note_writes(const c10::OperatorHandle& op, Stack& stack, size_t begin, const std::vector<int>& inputs) {
    for_each_tensor(stack, begin, [&](const Tensor& tensor, size_t i) {
      const auto found = number_of.find(storage_of(tensor));
      if (found == number_of.end() || !writes(op, i - begin)) return;
      auto& into = sources[found->second];
      into.insert(into.end(), inputs.begin(), inputs.end());
    });
  }

  // Makes all arguments meta tensors, as one of them is. A random operator first runs on scratch tensors.
  void prepare_for_meta(const c10::OperatorHandle& op, Stack& stack, size_t begin) {
    if (draws_ && op.hasTag(at::Tag::nondeterministic_seeded)) {
      Stack scratch(stack.begin() + static_cast<ptrdiff_t>(begin), stack.end());
      for_each_tensor(scratch, 0, [](Tensor& tensor, size_t) {
        tensor = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(torch::kCPU)).zero_();
      });
      op.callBoxed(scratch);
    }
    for_each_tensor(stack, begin, [&](Tensor& tensor, size_t i) {
      if (tensor.is_meta()) return;
      if (writes(op, i - begin))
        throw NotApart(concat(toString(op.operator_name()), " writes what it computes from another parameter"));
      tensor = on_meta(tensor);
    });
    for (size_t i = begin; i < stack.size(); ++i)
      if (stack[i].isDevice()) stack[i] = c10::Device(torch::kMeta);
  }

  static std::set<const void*> storages_in(Stack& stack, size_t begin) {
    std::set<const void*> storages;
    for_each_tensor(stack, begin, [&](const Tensor& tensor, size_t) { storages.insert(storage_of(tensor)); });
    return storages;
  }

  // A tensor with memory of its own; a meta tensor takes its place if it is not wanted.
  void note(Tensor& tensor, const std::vector<int>& inputs) {
    if (!tensor.has_storage() || number_of.contains(storage_of(tensor))) return;
    const int number = made.size();
    if (!tensor.is_meta() && tensor.numel() >= kSmall && !is_wanted_(number))
      tensor = on_meta(tensor).set_requires_grad(tensor.requires_grad());
    made.push_back(tensor.storage());
    number_of[storage_of(tensor)] = number;
    sources.push_back(inputs);
  }

  std::function<bool(int)> is_wanted_;
  bool draws_;
};

using Selection = std::function<Tensors(torch::nn::Module&)>;

// Tells for each of the model's tensors whether it is wanted.
IntVector<bool> choose(torch::nn::Module& model, const Selection& wanted) {
  std::set<const void*> chosen;
  for (const Tensor& tensor : wanted(model)) chosen.insert(tensor.unsafeGetTensorImpl());
  IntVector<bool> is_wanted;
  for (const Tensor& tensor : tensors_of(model)) is_wanted.push_back(chosen.contains(tensor.unsafeGetTensorImpl()));
  return is_wanted;
}

void free_others(const torch::nn::Module& model, const IntVector<bool>& is_wanted) {
  const IntVector<Tensor> tensors = tensors_of(model);
  for (int i = 0; i < tensors.size(); ++i)
    if (!is_wanted[i] && is_held(tensors[i])) put_data(tensors[i], on_meta(tensors[i]));
}

bool same_shapes(const IntVector<Tensor>& one, const IntVector<Tensor>& other) {
  return std::ranges::equal(
      one, other, [](const Tensor& a, const Tensor& b) { return a.sizes() == b.sizes() && a.dtype() == b.dtype(); });
}

void warn_not_apart(const std::exception& reason) {
  log_warning(
      concat("a stage makes the whole model before it frees the parts of other stages: ", first_line_of(reason)));
}

}  // namespace

NamedTensors held(const NamedTensors& tensors) {
  NamedTensors found;
  for (const NamedTensor& each : tensors)
    if (is_held(each.tensor)) found.push_back(each);
  return found;
}

// Does what set_data() does, which refuses to change between the meta device and another.
void put_data(const Tensor& tensor, const Tensor& data) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.detach().getIntrusivePtr());
}

Tensor on_meta(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(torch::kMeta));
}

PartialModel::PartialModel(std::function<ModulePtr()> make) : make_(std::move(make)) {
  Construction construction([](int) { return false; }, /*draws=*/false);
  try {
    skeleton_ = construction.run(make_);
  } catch (const std::exception& error) {
    warn_not_apart(error);
    apart_ = false;
    skeleton_ = make_();
  }
  std::set<int> registered;
  for (const Tensor& tensor : tensors_of(*skeleton_)) {
    const auto found = construction.number_of.find(storage_of(tensor));
    tensor_of_.push_back(found == construction.number_of.end() ? -1 : found->second);
    registered.insert(tensor_of_.back());
  }
  for (int i = 0; i < construction.made.size(); ++i)
    kept_.push_back(construction.made[i].use_count() > 1 && !registered.contains(i));
  sources_ = std::move(construction.sources);
  free_others(*skeleton_, IntVector<bool>(tensor_of_.size()));
}

ModulePtr PartialModel::make_part(uint64_t seed, const Selection& wanted) const {
  const IntVector<bool> is_wanted = choose(*skeleton_, wanted);
  IntVector<bool> needed = kept_;
  std::vector<int> to_do;
  for (int i = 0; i < is_wanted.size(); ++i)
    if (is_wanted[i] && tensor_of_[i] >= 0) to_do.push_back(tensor_of_[i]);
  for (int i = 0; i < kept_.size(); ++i)
    if (kept_[i]) to_do.push_back(i);
  for (std::set<int> seen; !to_do.empty();) {
    const int next = to_do.back();
    to_do.pop_back();
    if (!seen.insert(next).second) continue;
    needed[next] = true;
    to_do.insert(to_do.end(), sources_[next].begin(), sources_[next].end());
  }
  if (apart_) try {
      torch::manual_seed(seed);
      Construction construction([&](int i) { return i < needed.size() && needed[i]; }, /*draws=*/true);
      const ModulePtr model = construction.run(make_);
      const IntVector<Tensor> tensors = tensors_of(*model);
      if (!same_shapes(tensors, tensors_of(*skeleton_))) throw NotApart("its shapes differ from one time to the next");
      for (int i = 0; i < tensors.size(); ++i)
        if (is_wanted[i] && !is_held(tensors[i])) throw NotApart("a parameter can't be told apart from others");
      free_others(*model, is_wanted);
      return model;
    } catch (const std::exception& error) {
      warn_not_apart(error);
    }
  torch::manual_seed(seed);
  ModulePtr model = make_();
  free_others(*model, is_wanted);
  return model;
}

}  // namespace lockstep
