// SPDX-License-Identifier: Apache-2.0
#include "replica.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <set>

#include "lockstep/base/in_autograd.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep::python {
namespace {

// A tree of modules, so that "0.weight" is the parameter "weight" of the submodule "0": the names and tensors of Python's.
class Tree : public torch::nn::Module {
 public:
  void add(const std::string& name, const torch::Tensor& tensor, bool is_buffer) {
    const auto dot = name.find('.');
    if (dot != std::string::npos) return child(name.substr(0, dot)).add(name.substr(dot + 1), tensor, is_buffer);
    if (is_buffer)
      register_buffer(name, tensor);
    else
      register_parameter(name, tensor, tensor.requires_grad());
  }

 private:
  Tree& child(const std::string& name) {
    auto& made = children_by_name_[name];
    if (made == nullptr) made = register_module(name, std::make_shared<Tree>());
    return *made;
  }

  std::map<std::string, std::shared_ptr<Tree>> children_by_name_;
};

std::shared_ptr<torch::nn::Module> tree_of(const NamedTensors& parameters, const NamedTensors& buffers) {
  auto tree = std::make_shared<Tree>();
  for (const auto& [name, tensor] : parameters) tree->add(name, tensor, /*is_buffer=*/false);
  for (const auto& [name, tensor] : buffers) tree->add(name, tensor, /*is_buffer=*/true);
  return tree;
}

std::vector<torch::Tensor> trained(const NamedTensors& parameters) {
  std::vector<torch::Tensor> tensors;
  for (const auto& [name, tensor] : parameters)
    if (tensor.requires_grad()) tensors.push_back(tensor);
  return tensors;
}

UsageError unknown_batch(const World& world) {
  return UsageError({.what = "the number of samples of a batch is not known",
                     .here = world.describe(),
                     .likely = "tensors among the arguments of forward() that differ in dimension 0, or a call of "
                               "model.module instead of the model, or an output in which no tensors are found",
                     .next = "call model.samples(n) before backward(), or leave out weights='samples'"});
}

std::atomic<double> weight_of_this_backward{1};  // read on autograd's threads

}  // namespace

double loss_weight() { return weight_of_this_backward; }

// A hook of autograd's, as long as the replica exists.
class Replica::Hook : public torch::autograd::FunctionPreHook {
 public:
  using Gradients = torch::autograd::variable_list;
  using Call = std::function<void(Replica&, Gradients&)>;
  Hook(std::weak_ptr<Replica> replica, Call call) : replica_(std::move(replica)), call_(std::move(call)) {}

  Gradients operator()(const Gradients& gradients) override {
    Gradients changed = gradients;
    if (const auto replica = replica_.lock()) in_autograd([&] { call_(*replica, changed); });
    return changed;
  }

 private:
  std::weak_ptr<Replica> replica_;
  Call call_;
};

// From begin() to the end of the same backward(). Autograd holds it; if it is gone without end(), backward() failed.
class Replica::Backward {
 public:
  explicit Backward(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) { replica_->in_backward_ = true; }
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

  void end() {
    ended_ = true;
    replica_->in_backward_ = false;
    replica_->ddp_.end_backward();
  }

  ~Backward() {
    replica_->in_backward_ = false;
    replica_->factor_ = 1;
    weight_of_this_backward = 1;
    if (!ended_) replica_->ddp_.cancel_backward("an exception in it");
  }

 private:
  std::shared_ptr<Replica> replica_;
  bool ended_ = false;
};

Replica::Replica(const World& world, const NamedTensors& parameters, const NamedTensors& buffers,
                 std::shared_ptr<Optimizer> optimizer, const DistributedDataParallelOptions& options, bool by_samples)
    : world_(world),
      module_(tree_of(parameters, buffers)),
      optimizer_(std::move(optimizer)),
      ddp_(optimizer_ ? DistributedDataParallel(world, *module_, *optimizer_, options)
                      : DistributedDataParallel(world, *module_, options)),
      by_samples_(by_samples),
      parameters_(trained(parameters)) {}

Replica::~Replica() {
  for (const auto& [accumulator, hook] : on_gradient_)
    std::erase_if(accumulator->pre_hooks(), [hook = hook](const auto& each) { return each.get() == hook; });
}

// A hook of the node that adds to a parameter's .grad, before it does: after all hooks of the parameter itself, which torch keeps
// in one place for C++ and Python, so that those of the one displace those of the other.
void Replica::watch_parameters() {
  for (const torch::Tensor& parameter : parameters_) {
    auto hook = std::make_unique<Hook>(weak_from_this(), [](Replica& replica, Hook::Gradients& gradients) {
      replica.begin(nullptr);
      for (torch::Tensor& gradient : gradients) gradient = replica.scaled(gradient);
    });
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    on_gradient_.emplace_back(accumulator, hook.get());
    accumulator->add_pre_hook(std::move(hook));
  }
}

// A gradient of an empty batch may be NaN.
torch::Tensor Replica::scaled(const torch::Tensor& gradient) {
  if (factor_ == 1 || !gradient.defined()) return gradient;
  return factor_ == 0 ? torch::zeros_like(gradient) : gradient * factor_;
}

void Replica::watch(const std::vector<torch::Tensor>& outputs, double size) {
  std::erase_if(outputs_, [](const auto& output) { return output.expired(); });
  const auto forward = std::make_shared<const Forward>(size, !no_sync());
  for (const torch::Tensor& tensor : outputs) {
    if (!tensor.requires_grad() || tensor.is_leaf()) continue;
    const auto node = tensor.grad_fn();
    const auto output = std::make_shared<const Output>(node.get(), forward);
    outputs_.push_back(output);
    node->add_pre_hook(std::make_unique<Hook>(
        weak_from_this(), [output](Replica& replica, Hook::Gradients&) { replica.begin(output.get()); }));
  }
}

void Replica::set_samples(std::int64_t samples) {
  if (samples < 0) throw UsageError({.what = concat("a batch of ", samples, " samples")});
  given_samples_ = samples;
}

void Replica::begin(const Output* reached) {
  if (in_backward_ || !adds_to_parameters()) return;
  const auto backward = std::make_shared<Backward>(shared_from_this());
  try {
    const auto forwards = forwards_of_this_backward(reached);
    accumulates_ = !forwards.empty() && std::ranges::none_of(forwards, &Forward::exchanges);
    const BatchWeight weight = weight_of(forwards);
    weight_of_this_backward = static_cast<double>(weight.samples);
    const NoSyncGuard guard = accumulates_ ? begin_no_sync() : nullptr;
    factor_ = ddp_.begin_backward(weight);
  } catch (const std::exception& error) {
    ddp_.cancel_backward(error.what());
    throw;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([backward] { in_autograd([&] { backward->end(); }); });
}

// False in torch.autograd.grad(), and in a backward() to inputs that are no parameters.
bool Replica::adds_to_parameters() const {
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr || wanted->empty()) return true;
  return std::ranges::any_of(parameters_, [&](const torch::Tensor& parameter) {
    const auto found = wanted->find(torch::autograd::impl::try_get_grad_accumulator(parameter).get());
    return found != wanted->end() && found->second.needed_;
  });
}

// The node where backward() starts is not among its nodes; if it is an output, it is the one that was reached first.
std::vector<const Replica::Forward*> Replica::forwards_of_this_backward(const Output* reached) const {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  std::set<const Forward*> found;
  if (reached != nullptr) found.insert(reached->forward.get());
  for (const auto& each : outputs_)
    if (const auto output = each.lock())
      if (nodes->contains(const_cast<torch::autograd::Node*>(output->node))) found.insert(output->forward.get());
  return {found.begin(), found.end()};
}

BatchWeight Replica::weight_of(const std::vector<const Forward*>& forwards) {
  if (given_samples_) return *std::exchange(given_samples_, std::nullopt);
  double size = forwards.empty() ? NAN : 0;
  for (const Forward* forward : forwards) size += forward->size;
  if (!by_samples_) return {BatchWeight::kAlike, size};
  if (std::isnan(size)) throw unknown_batch(world_);
  return static_cast<std::int64_t>(size);
}

void Replica::skip_batch(bool joined) {
  given_samples_.reset();
  ddp_.begin_backward(joined ? BatchWeight::kJoined : BatchWeight::kNone);
  ddp_.end_backward();
}

Replica::NoSyncGuard Replica::begin_no_sync() {
  return NoSyncGuard(new DistributedDataParallel::NoSync(ddp_.no_sync()));
}

void Replica::set_no_sync(bool on) {
  if (on && !no_sync_) no_sync_ = begin_no_sync();
  if (!on) no_sync_.reset();
}

}  // namespace lockstep::python
