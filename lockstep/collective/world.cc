#include "lockstep/collective/world.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <exception>
#include <mutex>
#include <thread>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/backend.h"
#include "lockstep/collective/rendezvous.h"
#include "lockstep/launch/environment.h"

namespace lockstep {

// What the copies of a World share.
class WorldState {
 public:
  JobEnvironment job;
  torch::Device device = torch::kCPU;
  CoreSet cores;
  std::chrono::milliseconds timeout{};
  c10::intrusive_ptr<c10d::Store> store;  // none in a world of one
  BackendPtr gloo;                        // host memory
  BackendPtr nccl;                        // CUDA, where the device is one
  int exchanges = 0;                      // texts exchanged so far: keys are never used twice

  std::string describe() const {
    std::array<char, HOST_NAME_MAX + 1> host{};
    ::gethostname(host.data(), host.size() - 1);
    return concat("rank ", job.rank, " of ", job.world_size, " on ", host.data());
  }

  c10d::Backend& backend_for(const torch::Tensor& tensor, const char* operation) const {
    if (tensor.is_cpu()) return *gloo;
    require_device(tensor, device, concat("the tensor given to ", operation));
    return *nccl;
  }
};

namespace {

using StatePtr = std::shared_ptr<WorldState>;

torch::Device device_of_rank(torch::DeviceType type, int local_rank) {
  if (type == torch::kCPU) return torch::kCPU;
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(cuda_device_index(local_rank))};
}

// Where no launcher has narrowed this process to its own cores, its even share of the machine's.
CoreSet cores_of(const JobEnvironment& job) {
  const CoreSet usable = usable_cores();
  const bool narrowed = static_cast<long>(usable.size()) < ::sysconf(_SC_NPROCESSORS_ONLN);
  return narrowed ? usable : cores_of_rank(usable, job.local_rank, job.local_size);
}

StatePtr make_state(const JobEnvironment& job, const WorldOptions& options) {
  auto state = std::make_shared<WorldState>();
  state->job = job;
  state->timeout = options.timeout;
  state->device = device_of_rank(options.device, job.local_rank);
  state->cores = cores_of(job);
  return state;
}

void connect(WorldState& state, c10::intrusive_ptr<c10d::Store> store, const std::string& address) {
  state.store = std::move(store);
  const BackendOptions options{state.job.rank, state.job.world_size, address, state.timeout};
  state.gloo = make_gloo(state.store, options);
  if (state.device.is_cuda()) state.nccl = make_nccl(state.store, options);
}

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return c10d::ReduceOp::SUM;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
  }
  return c10d::ReduceOp::SUM;
}

PeerLost peer_lost(const WorldState& state, const std::string& operation, const std::exception& cause) {
  return PeerLost({.what = concat(operation, " failed: ", split(cause.what(), '\n').front()),
                   .here = state.describe(),
                   .likely = "another rank died, failed or stopped; the launcher names the first",
                   .next = "run again with --resume to go on from the last checkpoint"});
}

// Issues one collective; what Gloo or NCCL throws, now or while waiting, becomes PeerLost.
template <class Issue>
Work issue(const StatePtr& state, const std::string& operation, Issue&& call) {
  c10::intrusive_ptr<c10d::Work> work;
  try {
    work = call();
  } catch (const std::exception& error) {
    throw peer_lost(*state, operation, error);
  }
  return Work([state, operation, work] {
    try {
      work->wait();
    } catch (const std::exception& error) {
      throw peer_lost(*state, operation, error);
    }
  });
}

std::string missing_ranks(c10d::Store& store, const std::vector<std::string>& keys) {
  std::vector<std::string> missing;
  for (std::size_t rank = 0; rank < keys.size(); ++rank)
    if (!store.check({keys[rank]})) missing.push_back(std::to_string(rank));
  return join(missing, ", ");
}

void wait_for_keys(const WorldState& state, const std::vector<std::string>& keys, const std::string& topic) try {
  state.store->wait(keys, state.timeout);
} catch (const std::exception&) {
  throw RendezvousError({.what = concat("no word from rank ", missing_ranks(*state.store, keys), " about ", topic),
                         .here = state.describe(),
                         .likely = "that rank died, or does not make the same calls in the same order",
                         .next = "look at its output"});
}

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

void Work::wait() { waiter_(); }

World World::from_env(const WorldOptions& options) {
  const JobEnvironment job = read_job_environment();
  StatePtr state = make_state(job, options);
  set_log_rank(job.rank, job.world_size);
  if (job.world_size > 1) connect(*state, connect_store(job, options.timeout), address_towards(job));
  return World(std::move(state));
}

World World::single(const WorldOptions& options) { return World(make_state(JobEnvironment{}, options)); }

int World::rank() const { return state_->job.rank; }
int World::size() const { return state_->job.world_size; }
int World::local_rank() const { return state_->job.local_rank; }
int World::local_size() const { return state_->job.local_size; }
int World::node_rank() const { return state_->job.node_rank; }
torch::Device World::device() const { return state_->device; }
const CoreSet& World::cores() const { return state_->cores; }
std::string World::describe() const { return state_->describe(); }

void World::all_reduce(const torch::Tensor& tensor, ReduceOp op) const { all_reduce_async(tensor, op).wait(); }

Work World::all_reduce_async(const torch::Tensor& tensor, ReduceOp op) const {
  if (size() == 1) return Work([] {});
  return issue(state_, "all_reduce", [&] {
    std::vector<torch::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    return state_->backend_for(tensor, "all_reduce").allreduce(tensors, options);
  });
}

void World::broadcast(const torch::Tensor& tensor, int root) const {
  if (size() == 1) return;
  issue(state_, "broadcast", [&] {
    std::vector<torch::Tensor> tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return state_->backend_for(tensor, "broadcast").broadcast(tensors, options);
  }).wait();
}

torch::Tensor World::all_gather(const torch::Tensor& tensor) const {
  if (size() == 1) return tensor.detach().unsqueeze(0).clone();
  std::vector<std::vector<torch::Tensor>> gathered(1);
  for (int i = 0; i < size(); ++i) gathered[0].push_back(torch::empty_like(tensor));
  issue(state_, "all_gather", [&] {
    std::vector<torch::Tensor> tensors{tensor};
    return state_->backend_for(tensor, "all_gather").allgather(gathered, tensors, {});
  }).wait();
  return torch::stack(gathered[0]);
}

void World::barrier() const { all_reduce(torch::zeros({1})); }

std::vector<std::string> World::exchange_texts(const std::string& topic, const std::string& mine) const {
  if (size() == 1) return {mine};
  const int round = state_->exchanges++;
  std::vector<std::string> keys;
  for (int i = 0; i < size(); ++i) keys.push_back(concat("text/", round, "/", i));
  state_->store->set(keys[static_cast<std::size_t>(rank())], bytes_of(mine));
  wait_for_keys(*state_, keys, topic);
  std::vector<std::string> texts;
  for (const auto& key : keys) texts.push_back(text_of(state_->store->get(key)));
  return texts;
}

void require_device(const torch::Tensor& tensor, torch::Device device, const std::string& name) {
  const bool same_type = tensor.device().type() == device.type();
  if (same_type && (!device.has_index() || tensor.device().index() == device.index())) return;
  throw DeviceError({.what = concat(name, " is on ", tensor.device().str(), ", but ", device.str(), " is needed"),
                     .likely = "a tensor or a module that was not moved",
                     .next = "call .to(world.device()) on it first"});
}

namespace {

// The first exception of any rank; the others' are its consequence.
class FirstError {
 public:
  void keep(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

JobEnvironment job_of_thread(int rank, int ranks) {
  JobEnvironment job;
  job.launcher = "threads";
  job.rank = job.local_rank = rank;
  job.world_size = job.local_size = ranks;
  return job;
}

}  // namespace

void run_ranks(int ranks, const std::function<void(World&)>& body, const WorldOptions& options) {
  const CoreSet all_cores = usable_cores();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  FirstError first_error;
  const auto run_rank = [&](int rank) {
    try {
      pin_this_thread(cores_of_rank(all_cores, rank, ranks));
      at::set_num_threads(std::max(1, static_cast<int>(all_cores.size()) / ranks));
      World world(make_state(job_of_thread(rank, ranks), options));
      if (ranks > 1) connect(*world.state_, store, "127.0.0.1");
      // Kept before the world is closed: what that does to the other ranks must not be taken for the cause.
      try {
        body(world);
      } catch (...) {
        first_error.keep(std::current_exception());
      }
    } catch (...) {
      first_error.keep(std::current_exception());
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run_rank, rank);
  for (auto& thread : threads) thread.join();
  first_error.rethrow();
}

}  // namespace lockstep
