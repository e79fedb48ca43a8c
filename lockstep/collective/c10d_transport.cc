#include "lockstep/collective/c10d_transport.h"

#include <cstdlib>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#ifdef LOCKSTEP_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return c10d::ReduceOp::SUM;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
  }
  return c10d::ReduceOp::SUM;
}

class C10dTransport : public Transport {
 public:
  C10dTransport(BackendPtr backend, TransportOptions options)
      : backend_(std::move(backend)), options_(std::move(options)) {}

  Work all_reduce_async(const torch::Tensor& tensor, ReduceOp op) override {
    return issue("all_reduce", [&] {
      std::vector<torch::Tensor> tensors{tensor};
      c10d::AllreduceOptions options;
      options.reduceOp = to_c10d(op);
      return backend_->allreduce(tensors, options);
    });
  }

  void broadcast(const torch::Tensor& tensor, int root) override {
    issue("broadcast", [&] {
      std::vector<torch::Tensor> tensors{tensor};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return backend_->broadcast(tensors, options);
    }).wait();
  }

  torch::Tensor all_gather(const torch::Tensor& tensor) override {
    std::vector<std::vector<torch::Tensor>> gathered(1);
    for (int i = 0; i < options_.size; ++i) gathered[0].push_back(torch::empty_like(tensor));
    issue("all_gather", [&] {
      std::vector<torch::Tensor> tensors{tensor};
      return backend_->allgather(gathered, tensors, {});
    }).wait();
    return torch::stack(gathered[0]);
  }

  torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) override {
    return torch::empty(sizes, options);
  }

  std::optional<shm::Group> machine_group() override { return std::nullopt; }

  void fail(const std::string&) override {}  // the closed connection tells the others

 private:
  // Issues one collective. What the backend throws at once is about the arguments; what it throws later, about a peer.
  template <class Call>
  Work issue(const char* operation, Call&& call) {
    c10::intrusive_ptr<c10d::Work> work;
    try {
      work = call();
    } catch (const std::exception& error) {  // before anything was sent
      throw UsageError({.what = concat(operation, " refused: ", split(error.what(), '\n').front()),
                        .here = options_.describe,
                        .likely = "a dtype or a layout that c10d does not exchange"});
    }
    return Work([operation, work, here = options_.describe] {
      try {
        work->wait();
      } catch (const std::exception& error) {
        throw peer_lost(operation, here, error);
      }
    });
  }

  static PeerLost peer_lost(const char* operation, const std::string& here, const std::exception& cause) {
    return PeerLost({.what = concat(operation, " failed: ", split(cause.what(), '\n').front()),
                     .here = here,
                     .likely = "another rank died, failed or stopped; the launcher names the first",
                     .next = "run again with --resume to go on from the last checkpoint"});
  }

  BackendPtr backend_;
  TransportOptions options_;
};

c10::intrusive_ptr<c10d::Store> with_prefix(const c10::intrusive_ptr<c10d::Store>& store, const char* prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

std::shared_ptr<gloo::transport::Device> gloo_device(const std::string& address) {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr) return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  return c10d::ProcessGroupGloo::createDeviceForHostname(address);
}

}  // namespace

std::unique_ptr<Transport> make_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                     const TransportOptions& options) try {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);  // create_default would put a loopback device first
  gloo->devices.push_back(gloo_device(options.address));
  return std::make_unique<C10dTransport>(
      c10::make_intrusive<c10d::ProcessGroupGloo>(with_prefix(store, "gloo"), options.rank, options.size, gloo), options);
} catch (const std::exception& error) {
  throw RendezvousError({.what = concat("can't connect the ranks over Gloo: ", split(error.what(), '\n').front()),
                         .here = concat(options.describe, " at ", options.address),
                         .likely = "a rank died while starting, or a firewall stands between the machines",
                         .next = "look at the other ranks' output; GLOO_SOCKET_IFNAME chooses another network"});
}

#ifdef LOCKSTEP_WITH_CUDA

std::unique_ptr<Transport> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, const TransportOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  return std::make_unique<C10dTransport>(
      c10::make_intrusive<c10d::ProcessGroupNCCL>(with_prefix(store, "nccl"), options.rank, options.size, nccl), options);
}

int cuda_device_count() { return c10::cuda::device_count(); }

int cuda_device_index(int local_rank) {
  const int devices = c10::cuda::device_count();
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (local_rank < devices) return local_rank;
  throw DeviceError({.what = concat("local rank ", local_rank, " has no GPU: ", devices, " visible"),
                     .here = concat("CUDA_VISIBLE_DEVICES=", visible != nullptr ? visible : "(not set)"),
                     .likely = "more ranks on this machine than GPUs, or none is visible",
                     .next = "start fewer ranks, change CUDA_VISIBLE_DEVICES, or use --device cpu"});
}

#else

std::unique_ptr<Transport> make_nccl(const c10::intrusive_ptr<c10d::Store>&, const TransportOptions&) {
  cuda_device_index(0);
  return {};
}

int cuda_device_count() { return 0; }

int cuda_device_index(int) {
  throw DeviceError({.what = "this lockstep was built without CUDA",
                     .likely = "--device cuda with the release preset",
                     .next = "build the cuda preset (`make cuda`), or use --device cpu"});
}

#endif

}  // namespace lockstep
