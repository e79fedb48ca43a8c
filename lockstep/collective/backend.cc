#include "lockstep/collective/backend.h"

#include <cstdlib>

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

c10::intrusive_ptr<c10d::Store> with_prefix(const c10::intrusive_ptr<c10d::Store>& store, const char* prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

std::shared_ptr<gloo::transport::Device> gloo_device(const std::string& address) {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr) return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  return c10d::ProcessGroupGloo::createDeviceForHostname(address);
}

}  // namespace

BackendPtr make_gloo(const c10::intrusive_ptr<c10d::Store>& store, const BackendOptions& options) try {
  auto gloo = c10d::ProcessGroupGloo::Options::create_default(options.timeout);
  gloo->devices.push_back(gloo_device(options.address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(with_prefix(store, "gloo"), options.rank, options.size, gloo);
} catch (const std::exception& error) {
  throw RendezvousError({.what = concat("can't connect the ranks over Gloo: ", split(error.what(), '\n').front()),
                         .here = concat("rank ", options.rank, " of ", options.size, " at ", options.address),
                         .likely = "a rank died while starting, or a firewall stands between the machines",
                         .next = "look at the other ranks' output; GLOO_SOCKET_IFNAME chooses another network"});
}

#ifdef LOCKSTEP_WITH_CUDA

BackendPtr make_nccl(const c10::intrusive_ptr<c10d::Store>& store, const BackendOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(with_prefix(store, "nccl"), options.rank, options.size, nccl);
}

bool cuda_is_available() { return c10::cuda::device_count() > 0; }

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

BackendPtr make_nccl(const c10::intrusive_ptr<c10d::Store>&, const BackendOptions&) {
  cuda_device_index(0);
  return {};
}

bool cuda_is_available() { return false; }

int cuda_device_index(int) {
  throw DeviceError({.what = "this lockstep was built without CUDA",
                     .likely = "--device cuda with the release preset",
                     .next = "build the cuda preset (`make cuda`), or use --device cpu"});
}

#endif

}  // namespace lockstep
