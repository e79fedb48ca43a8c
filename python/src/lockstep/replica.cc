// SPDX-License-Identifier: Apache-2.0
// One rank's copy of a Python model: C++'s DistributedDataParallel, and the hooks through which Python's own
// loss.backward() begins and ends an exchange.
//
// Flow:    forward -> watch(outputs) -> autograd reaches an output: begin_backward() -> ... -> the end of backward()
// Owns:    a C++ module tree with the Python model's own parameters, the exchange, the optimizer's C++ side
// Threads: one thread; hooks run on autograd's thread, without the GIL
// Ranks:   every rank makes it at the same time and makes the same calls in the same order
//
// docs/design/python.md says where a backward() begins and ends, and which samples it counts.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "lockstep/base/process/in_autograd.h"
#include "lockstep/base/text.h"
#include "lockstep/base/torch_version.h"
#include "lockstep/ddp.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/optimizer.h"
#include "lockstep/strategy/option_names.h"
#include "lockstep/world.h"

namespace lockstep::python {
namespace {

using Options = DistributedDataParallelOptions;
using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

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

UsageError unknown_batch(const World& world) {
  return UsageError({.what = "the number of samples of a batch is not known",
                     .here = world.describe(),
                     .likely =
                         "arguments of forward() that differ in dimension 0, a call of model.module instead of the "
                         "model, or an output without tensors",
                     .next = "call model.samples(n) before backward(), or leave out weights='samples'"});
}

std::atomic<double> weight_of_this_backward{1};  // read on autograd's threads

class Replica : public std::enable_shared_from_this<Replica> {
 public:
  // optimizer: null if it is not one of lockstep's. by_samples: ranks count by dimension 0 of what forward() was given;
  // else alike. Blocks; throws as DistributedDataParallel.
  Replica(const World& world, const NamedTensors& parameters, const NamedTensors& buffers,
          std::shared_ptr<Optimizer> optimizer, const Options& options, bool by_samples)
      : module_(tree_of(parameters, buffers)),
        optimizer_(std::move(optimizer)),
        ddp_(optimizer_ ? DistributedDataParallel(world, *module_, *optimizer_, options)
                        : DistributedDataParallel(world, *module_, options)),
        by_samples_(by_samples),
        parameters_(tensors_of(trainable(named_parameters(*module_)))) {}
  ~Replica() {
    for (const auto& [accumulator, hook] : on_gradient_)
      std::erase_if(accumulator->pre_hooks(), [hook = hook](const auto& each) { return each.get() == hook; });
  }
  Replica& operator=(Replica&&) = delete;

  // Once, when a shared_ptr owns this. A hook of the node that adds to a parameter's .grad, before it does: after all hooks of
  // the parameter itself, which torch keeps in one place for C++ and Python, so that those of the one displace those of the other.
  void watch_parameters() {
    for (const torch::Tensor& parameter : parameters_) {
      auto hook = std::make_unique<Hook>(weak_from_this(), [](Replica& replica, Gradients& gradients) {
        replica.begin(nullptr);
        for (torch::Tensor& gradient : gradients) gradient = replica.scaled(gradient);
      });
      auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
      on_gradient_.emplace_back(accumulator, hook.get());
      accumulator->add_pre_hook(std::move(hook));
    }
  }

  void enter_forward(bool training) {
    if (training) observe::begin_next_step();
    forward_.emplace(training ? Phase::kForward : Phase::kValidating);
  }
  void leave_forward() { forward_.reset(); }

  // After a forward: its outputs, and dimension 0 of its inputs; NaN: they differ, or have none.
  void watch(const std::vector<torch::Tensor>& outputs, double size) {
    std::erase_if(outputs_, [](const auto& output) { return output.expired(); });
    const auto forward = std::make_shared<const Forward>(size, !no_sync());
    for (const torch::Tensor& tensor : outputs) {
      if (!tensor.requires_grad() || tensor.is_leaf()) continue;
      const auto node = tensor.grad_fn();
      const auto output = std::make_shared<const Output>(node.get(), forward);
      outputs_.push_back(output);
      node->add_pre_hook(std::make_unique<Hook>(
          weak_from_this(), [output](Replica& replica, Gradients&) { replica.begin(output.get()); }));
    }
  }

  // The next backward() counts this many samples, whatever its forwards did.
  void set_samples(int64_t samples) {
    if (samples < 0) throw UsageError({.what = concat("a batch of ", samples, " samples"), .next = "give 0 or more"});
    given_samples_ = samples;
  }

  // Takes part in an exchange without a backward(). joined: where ranks count alike, this one still does. Blocks.
  void skip_batch(bool joined) {
    given_samples_.reset();
    has_mean_ = false;
    ddp_.begin_backward(joined ? BatchWeight::kJoined : BatchWeight::kNone);
    ddp_.end_backward();
  }

  // Every backward() comes through begin(): what has changed .grad since the last call was written by hand.
  void mean_gradients() {
    if (!has_mean_) ddp_.mean_gradients();
    has_mean_ = true;
  }

  void set_no_sync(bool on) {
    if (on && !no_sync_) no_sync_ = begin_no_sync();
    if (!on) no_sync_.reset();
  }
  bool no_sync() const { return no_sync_ != nullptr; }

  // Tells whether the last backward() was one whose gradients are still to be exchanged.
  bool accumulates() const { return accumulates_; }

  DistributedDataParallel& ddp() { return ddp_; }

 private:
  using NoSyncGuard = std::unique_ptr<DistributedDataParallel::NoSync>;
  using Gradients = torch::autograd::variable_list;
  struct Forward {
    double size;
    bool exchanges;
  };
  // An output of a forward; lives as long as its node.
  struct Output {
    const torch::autograd::Node* node;
    std::shared_ptr<const Forward> forward;
  };

  // A hook of autograd's, as long as the replica exists.
  class Hook : public torch::autograd::FunctionPreHook {
   public:
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
  class Backward {
   public:
    explicit Backward(std::shared_ptr<Replica> replica) : replica_(std::move(replica)) {
      replica_->in_backward_ = true;
    }
    Backward& operator=(Backward&&) = delete;

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

  // Autograd has reached an output, or the gradient of a parameter (null).
  void begin(const Output* reached) {
    if (in_backward_ || !adds_to_parameters()) return;
    has_mean_ = false;
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
  bool adds_to_parameters() const {
    const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
    if (wanted == nullptr || wanted->empty()) return true;
    return std::ranges::any_of(parameters_, [&](const torch::Tensor& parameter) {
      const auto found = wanted->find(torch::autograd::impl::try_get_grad_accumulator(parameter).get());
      return found != wanted->end() && found->second.needed_;
    });
  }

  // The node where backward() starts is not among its nodes; if it is an output, it is the one that was reached first.
  std::vector<const Forward*> forwards_of_this_backward(const Output* reached) const {
    const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    std::set<const Forward*> found;
    if (reached != nullptr) found.insert(reached->forward.get());
    for (const auto& each : outputs_)
      if (const auto output = each.lock())
        if (nodes->contains(const_cast<torch::autograd::Node*>(output->node))) found.insert(output->forward.get());
    return {found.begin(), found.end()};
  }

  BatchWeight weight_of(const std::vector<const Forward*>& forwards) {
    if (given_samples_) return *std::exchange(given_samples_, std::nullopt);
    double size = forwards.empty() ? NAN : 0;
    for (const Forward* forward : forwards) size += forward->size;
    if (!by_samples_) return {BatchWeight::kAlike, size};
    if (std::isnan(size)) throw unknown_batch(ddp_.world());
    return static_cast<int64_t>(size);
  }

  // A gradient of an empty batch may be NaN.
  torch::Tensor scaled(const torch::Tensor& gradient) {
    if (factor_ == 1 || !gradient.defined()) return gradient;
    return factor_ == 0 ? torch::zeros_like(gradient) : gradient * factor_;
  }

  NoSyncGuard begin_no_sync() { return NoSyncGuard(new DistributedDataParallel::NoSync(ddp_.no_sync())); }

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<Optimizer> optimizer_;
  DistributedDataParallel ddp_;
  std::optional<PhaseScope> forward_;
  bool by_samples_;
  std::vector<torch::Tensor> parameters_;  // that are trained; each once, or two hooks would scale its gradient twice
  std::vector<std::weak_ptr<const Output>> outputs_;  // of forwards whose graph still exists
  std::optional<int64_t> given_samples_;
  NoSyncGuard no_sync_;
  bool in_backward_ = false;
  bool accumulates_ = false;
  bool has_mean_ = false;                               // mean_gradients() was called since the last backward()
  double factor_ = 1;                                   // of the gradients of this backward()
  std::vector<std::pair<NodePtr, Hook*>> on_gradient_;  // of parameters_
};

// Calls start() of _hooks.py, and what that returns.
class PythonHook : public CommunicationHook {
 public:
  explicit PythonHook(py::object start) : start_(held(std::move(start))) {}

  Finish start(const World&, const GradientBucket& bucket) override {
    const py::gil_scoped_acquire gil;
    return [finish = held((*start_)(bucket.number, bucket.flat, bucket.parameters, bucket.is_last))] {
      const py::gil_scoped_acquire gil;
      (*finish)();
    };
  }

 private:
  std::shared_ptr<py::object> start_;
};

Options options_of(const py::dict& given) {
  Options options;
  const auto take = [&](const char* name, auto& into) {
    into = given[name].cast<std::remove_reference_t<decltype(into)>>();
  };
  if (given.contains("bucket_bytes")) take("bucket_bytes", options.bucket_bytes);
  take("broadcast_buffers", options.broadcast_buffers);
  take("share_parameters", options.share_parameters);
  take("mean_in_grad", options.mean_in_grad);
  take("find_unused_parameters", options.find_unused_parameters);
  take("static_graph", options.static_graph);
  take("gradient_as_bucket_view", options.gradient_as_bucket_view);
  take("ignored", options.ignored);
  take("sparse_parameters", options.sparse_parameters);
  options.algorithm = value_named<Algorithm>(given["algorithm"].cast<std::string>(), "algorithm");
  if (const py::object hook = given["hook"]; PyCallable_Check(hook.ptr()))
    options.hook = std::make_shared<PythonHook>(hook);
  else if (const auto hook = given["hook"].cast<std::optional<std::string>>())
    options.hook =
        make_hook({.kind = value_named<Compression>(*hook, "hook"), .amount = given["hook_amount"].cast<double>()});
  return options;
}

std::shared_ptr<Replica> make_replica(const World& world, const NamedTensors& parameters, const NamedTensors& buffers,
                                      const std::shared_ptr<Optimizer>& optimizer, const py::dict& given) {
  const auto weights = given["weights"].cast<std::optional<std::string>>();
  if (weights && *weights != "samples")
    throw UsageError(
        {.what = concat("weights='", *weights, "'"), .next = "weights='samples', or None: all ranks count alike"});
  const Options options = options_of(given);
  const py::gil_scoped_release others_run;
  const auto replica =
      std::make_shared<Replica>(world, parameters, buffers, optimizer, options, /*by_samples=*/weights.has_value());
  replica->watch_parameters();
  return replica;
}

py::dict statistics_of(Replica& replica) {
  const auto statistics = replica.ddp().statistics();
  return py::dict(py::arg("exchanges") = statistics.exchanges, py::arg("bytes") = statistics.bytes,
                  py::arg("exchange_seconds") = statistics.exchange_seconds,
                  py::arg("waiting_seconds") = statistics.waiting_seconds);
}

}  // namespace

double loss_weight() { return weight_of_this_backward; }

void bind_replica(py::module_& module) {
  py::class_<Replica, std::shared_ptr<Replica>>(module, "Replica")
      .def(py::init(&make_replica))
      .def("enter_forward", &Replica::enter_forward)
      .def("leave_forward", &Replica::leave_forward)
      .def("watch", &Replica::watch)
      .def("set_samples", &Replica::set_samples)
      .def("mean_gradients", &Replica::mean_gradients, Release())
      .def("skip_batch", &Replica::skip_batch, Release(), py::arg("joined"))
      .def_property("no_sync", &Replica::no_sync, &Replica::set_no_sync)
      .def_property_readonly("accumulates", &Replica::accumulates)
      .def_property_readonly("mean_in_grad", [](Replica& replica) { return replica.ddp().mean_in_grad(); })
      .def_property_readonly("samples_of_last_batch",
                             [](Replica& replica) { return replica.ddp().last_batch().samples; })
      .def_property_readonly("statistics", &statistics_of)
      .def("write_parameters",
           [](Replica& replica, const py::function& write) {
             const py::gil_scoped_release release;
             replica.ddp().write_parameters([&] {
               const py::gil_scoped_acquire acquire;
               write();
             });
           })
      .def(
          "parameters_written", [](Replica& replica) { replica.ddp().parameters_written(); }, Release());
}

}  // namespace lockstep::python
