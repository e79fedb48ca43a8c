#include "lockstep/collective/world.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <exception>
#include <mutex>
#include <thread>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/c10d_transport.h"
#include "lockstep/collective/rendezvous.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm_transport.h"
#include "lockstep/launch/environment.h"

namespace lockstep {

// What the copies of a World share.
class WorldState {
 public:
  JobEnvironment job;
  torch::Device device = torch::kCPU;
  CoreSet cores;
  std::chrono::milliseconds timeout{};
  c10::intrusive_ptr<c10d::Store> store;  // none in a world of one or of threads
  std::unique_ptr<Transport> host;        // for tensors in host memory
  std::unique_ptr<Transport> cuda;        // where the device is one
  int exchanges = 0;                      // texts exchanged so far: keys are never used twice

  std::string describe() const {
    std::array<char, HOST_NAME_MAX + 1> name{};
    ::gethostname(name.data(), name.size() - 1);
    return concat("rank ", job.rank, " of ", job.world_size, " on ", name.data());
  }

  // Also in a world of one: what would fail on many ranks fails on one.
  void require_exchangeable(const torch::Tensor& tensor, const char* operation) const {
    if (!tensor.is_contiguous())
      throw UsageError({.what = concat("the tensor given to ", operation, " is not contiguous: shape ", tensor.sizes(),
                                       ", strides ", tensor.strides()),
                        .here = describe(),
                        .next = "exchange tensor.contiguous() and copy the result back"});
    if (!tensor.is_cpu()) require_device(tensor, device, concat("the tensor given to ", operation));
  }

  Transport& transport_for(const torch::Tensor& tensor) const {
    if (tensor.is_cpu()) return *host;
    if (cuda) return *cuda;
    throw DeviceError({.what = "a collective of a CUDA tensor between ranks that are threads",
                       .here = describe(),
                       .next = "start the ranks as processes: `lockstep run` or --ranks"});
  }
};

namespace {

using StatePtr = std::shared_ptr<WorldState>;

torch::Device device_of_rank(torch::DeviceType type, int local_rank) {
  if (type == torch::kCPU) return torch::kCPU;
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(cuda_device_index(local_rank))};
}

StatePtr make_state(const JobEnvironment& job, const WorldOptions& options) {
  auto state = std::make_shared<WorldState>();
  state->job = job;
  state->timeout = options.timeout;
  state->device = device_of_rank(options.device, job.local_rank);
  state->cores = cores_of(job, usable_cores());
  return state;
}

TransportOptions transport_options(const WorldState& state) {
  return {.rank = state.job.rank,
          .size = state.job.world_size,
          .describe = state.describe(),
          .address = address_towards(state.job),
          .timeout = state.timeout};
}

// The same on two ranks if they can share memory: one running kernel, and one machine to the launcher.
std::string machine_id(const JobEnvironment& job) {
  return concat(read_file("/proc/sys/kernel/random/boot_id"), job.node_rank);
}

bool on_one_machine(const World& world, const JobEnvironment& job) {
  const auto machines = world.exchange_texts("the machines", machine_id(job));
  return std::all_of(machines.begin(), machines.end(), [&](const auto& each) { return each == machines.front(); });
}

std::string missing_ranks(c10d::Store& store, const std::vector<std::string>& keys) try {
  std::vector<std::string> missing;
  for (std::size_t rank = 0; rank < keys.size(); ++rank)
    if (!store.check({keys[rank]})) missing.push_back(std::to_string(rank));
  return join(missing, ", ");
} catch (const std::exception&) {
  return "0, which keeps the store";
}

RendezvousError no_word(const WorldState& state, const std::vector<std::string>& keys, const std::string& topic) {
  return RendezvousError({.what = concat("no word from rank ", missing_ranks(*state.store, keys), " about ", topic),
                          .here = state.describe(),
                          .likely = "that rank died, or does not make the same calls in the same order",
                          .next = "look at its output"});
}

std::vector<std::string> exchange_through_store(WorldState& state, const std::string& topic, const std::string& mine) {
  const int round = state.exchanges++;
  std::vector<std::string> keys;
  for (int i = 0; i < state.job.world_size; ++i) keys.push_back(concat("text/", round, "/", i));
  std::vector<std::string> texts;
  try {
    state.store->set(keys[static_cast<std::size_t>(state.job.rank)], std::vector<std::uint8_t>(mine.begin(), mine.end()));
    state.store->wait(keys, state.timeout);
    for (const auto& bytes : state.store->multiGet(keys)) texts.emplace_back(bytes.begin(), bytes.end());
  } catch (const std::exception&) {
    throw no_word(state, keys, topic);
  }
  return texts;
}

// First the lengths, then all texts at the length of the longest: tensors of the same shape on every rank.
std::vector<std::string> exchange_as_tensors(const World& world, const std::string& mine) {
  const torch::Tensor lengths = world.all_gather(torch::tensor({static_cast<std::int64_t>(mine.size())}));
  const torch::Tensor padded = torch::zeros({lengths.max().item<std::int64_t>()}, torch::kUInt8);
  std::copy(mine.begin(), mine.end(), padded.mutable_data_ptr<std::uint8_t>());
  const torch::Tensor all = world.all_gather(padded);
  std::vector<std::string> texts;
  for (int rank = 0; rank < world.size(); ++rank) {
    const auto* text = all[rank].const_data_ptr<std::uint8_t>();
    texts.emplace_back(text, text + lengths[rank].item<std::int64_t>());
  }
  return texts;
}

}  // namespace

void Work::wait() { waiter_(); }

World World::from_env(const WorldOptions& options) {
  const JobEnvironment job = read_job_environment();
  const World world(make_state(job, options));
  set_log_rank(job.rank, job.world_size);
  if (job.world_size > 1) world.connect();
  return world;
}

void World::connect() const {
  state_->store = connect_store(state_->job, state_->timeout);
  const TransportOptions options = transport_options(*state_);
  state_->host = on_one_machine(*this, state_->job) ? make_shared_memory(*this, options)
                                                    : make_gloo(state_->store, options);
  if (state_->device.is_cuda()) state_->cuda = make_nccl(state_->store, options);
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
  state_->require_exchangeable(tensor, "all_reduce");
  if (size() == 1) return Work([] {});
  Work work = state_->transport_for(tensor).all_reduce_async(tensor, op);
  return Work([state = state_, work]() mutable { work.wait(); });  // the world lives as long as what it has under way
}

void World::broadcast(const torch::Tensor& tensor, int root) const {
  state_->require_exchangeable(tensor, "broadcast");
  if (size() > 1) state_->transport_for(tensor).broadcast(tensor, root);
}

torch::Tensor World::all_gather(const torch::Tensor& tensor) const {
  state_->require_exchangeable(tensor, "all_gather");
  if (size() == 1) return tensor.detach().unsqueeze(0).clone();
  return state_->transport_for(tensor).all_gather(tensor);
}

torch::Tensor World::allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) const {
  if (size() == 1 || !options.device().is_cpu()) return torch::empty(sizes, options);
  return state_->host->allocate(sizes, options);
}

std::optional<shm::Group> World::machine_group() const {
  if (size() == 1 || !device().is_cpu()) return std::nullopt;
  return state_->host->machine_group();
}

void World::barrier() const { all_reduce(torch::zeros({1})); }

std::vector<std::string> World::exchange_texts(const std::string& topic, const std::string& mine) const {
  if (size() == 1) return {mine};
  return state_->host ? exchange_as_tensors(*this, mine) : exchange_through_store(*state_, topic, mine);
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

void use_share_of_cores(int rank, int ranks) {
  const CoreSet mine = cores_of_rank(usable_cores(), rank, ranks);
  pin_this_thread(mine);
  at::set_num_threads(static_cast<int>(mine.size()));
}

std::string reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void run_ranks(int ranks, const std::function<void(World&)>& body, const WorldOptions& options) {
  auto transports = make_shared_memory_of_threads(ranks, options.timeout);
  FirstError first_error;
  const auto run_rank = [&](int rank) {
    World world = World::single();
    try {
      use_share_of_cores(rank, ranks);
      world.state_ = make_state(job_of_thread(rank, ranks), options);
      world.state_->host = std::move(transports[static_cast<std::size_t>(rank)]);
      body(world);
    } catch (...) {
      first_error.keep(std::current_exception());
      if (world.state_->host) world.state_->host->fail(reason_of(std::current_exception()));
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run_rank, rank);
  for (auto& thread : threads) thread.join();
  first_error.rethrow();
}

}  // namespace lockstep
