#include "lockstep/collective/shm_transport.h"

#include <deque>
#include <exception>
#include <list>
#include <numeric>
#include <optional>

#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/collective/shm/group.h"
#include "lockstep/collective/shm_dtype.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::size_t elements(const torch::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::size_t>(tensor.numel()) : 0;
}

shm::DType dtype_of(const torch::Tensor& tensor) { return *to_shm_dtype(tensor.scalar_type()); }
const void* address(const torch::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
void* writable(const torch::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

std::vector<std::size_t> to_core(const std::vector<std::int64_t>& counts) { return {counts.begin(), counts.end()}; }

// `call` in the core's words.
shm::Call to_core(const Collective& call, int size) {
  const torch::Tensor& some = call.input.defined() ? call.input : call.output;
  const shm::DType dtype = some.defined() ? dtype_of(some) : shm::DType::kFloat32;
  const void* const input = address(call.input);
  void* const output = writable(call.output);
  switch (call.operation) {
    case Operation::kAllReduce:
      return shm::AllReduce{input, output, elements(call.input), dtype, call.op, call.algorithm};
    case Operation::kReduce: return shm::Reduce{input, output, elements(call.input), dtype, call.op, call.root};
    case Operation::kReduceScatter:
      return shm::ReduceScatter{input, output, elements(call.output), to_core(call.counts), dtype, call.op};
    case Operation::kAllGather: return shm::AllGather{input, output, elements(call.input), to_core(call.counts), dtype};
    case Operation::kBroadcast: return shm::Broadcast{output, elements(call.output), dtype, call.root};
    case Operation::kGather: return shm::Gather{input, output, elements(call.input), {}, dtype, call.root};
    case Operation::kScatter: return shm::Scatter{input, output, elements(call.output), {}, dtype, call.root};
    case Operation::kAllToAll:
      return shm::AllToAll{input,
                           output,
                           elements(call.input) / static_cast<std::size_t>(size),
                           to_core(call.counts),
                           to_core(call.receive_counts),
                           dtype};
    default: return shm::Barrier{};
  }
}

// Note [Postponed calls]
// start() only notes the call; whoever waits makes it, and those started before it. The ranks of a machine keep its
// cores busy with backward: a thread beside them would take from their time what it gives, and its waiting for the
// other ranks on top (docs/design/exchange.md has the figures). Every rank starts in the same order, so every rank
// makes the calls in the same order, whichever it waits for first.
//
// Who only looks (done), waits for a limited time, or turns to a message hands what was postponed to the group's worker
// thread: otherwise each of two ranks could wait for a call that the other keeps back.
class Queue {
 public:
  struct Item {
    Collective call;  // keeps the memory
    bool finished = false;
    std::optional<shm::Work> beside;  // under way on the worker thread
    std::exception_ptr error;
  };
  using ItemPtr = std::shared_ptr<Item>;

  explicit Queue(shm::Group& group) : group_(group) {}

  ItemPtr add(Collective call) {
    items_.push_back(std::make_shared<Item>(Item{.call = std::move(call)}));
    return items_.back();
  }

  // Here, up to `last`, and those before it.
  void make_calls_until(const ItemPtr& last) {
    while (!last->finished) make_first();
  }
  void make_all_calls() {
    while (!items_.empty()) make_first();
  }

  // On the thread beside, all of them.
  void hand_over() {
    for (const ItemPtr& item : items_)
      if (!item->beside) item->beside = group_.start(to_core(item->call, group_.size()));
    while (!items_.empty() && items_.front()->beside->done()) make_first();
  }

 private:
  void make_first() {
    const ItemPtr item = std::move(items_.front());
    items_.pop_front();
    try {
      if (item->beside)
        item->beside->wait();
      else
        group_.run(to_core(item->call, group_.size()));
    } catch (...) {
      item->error = std::current_exception();
    }
    item->finished = true;
    item->call = {};
  }

  shm::Group& group_;
  std::deque<ItemPtr> items_;  // not known to be finished; those on the thread beside come first
};

class PostponedCall : public Pending {
 public:
  PostponedCall(Queue& queue, Queue::ItemPtr item) : queue_(queue), item_(std::move(item)) {}

  void wait() override {
    queue_.make_calls_until(item_);
    settle();
  }
  void wait(Deadline deadline) override {
    if (!item_->finished) queue_.hand_over();
    if (!item_->finished) item_->beside->wait(deadline);
    wait();
  }
  bool done() override {
    if (!item_->finished) queue_.hand_over();
    return item_->finished;
  }

 private:
  void settle() const {
    if (item_->error) std::rethrow_exception(item_->error);
  }

  Queue& queue_;
  Queue::ItemPtr item_;
};

class MessageUnderWay : public Pending {
 public:
  explicit MessageUnderWay(shm::Work work) : work_(std::move(work)) {}
  void wait() override { work_.wait(); }
  void wait(Deadline deadline) override { work_.wait(deadline); }
  bool done() override { return work_.done(); }
  int source() const override { return work_.source(); }

 private:
  shm::Work work_;
};

class ShmTransport : public Transport {
 public:
  explicit ShmTransport(shm::Group group) : group_(std::move(group)) {}

  // In good order, unless an exception is on its way out: then the others learn at once that this rank is gone.
  ~ShmTransport() override {
    if (std::uncaught_exceptions() > 0) return;
    try {
      group_.leave();
    } catch (const std::exception&) {
    }
  }

  std::shared_ptr<Pending> start(Collective call) override {
    return std::make_shared<PostponedCall>(queue_, queue_.add(std::move(call)));
  }

  void run(const Collective& call) override {
    queue_.make_all_calls();
    group_.run(to_core(call, group_.size()));
  }

  std::shared_ptr<Pending> start_send(const torch::Tensor& tensor, int to, int tag) override {
    return start_message(tensor, send_of(tensor, to, tag));
  }
  std::shared_ptr<Pending> start_receive(const torch::Tensor& tensor, int from, int tag) override {
    return start_message(tensor, receive_of(tensor, from, tag));
  }
  void send(const torch::Tensor& tensor, int to, int tag) override {
    queue_.hand_over();
    group_.send(send_of(tensor, to, tag));
  }
  int receive(const torch::Tensor& tensor, int from, int tag) override {
    queue_.hand_over();
    return group_.receive(receive_of(tensor, from, tag));
  }

  std::unique_ptr<Transport> group(const RankLists& lists) override {
    queue_.make_all_calls();
    auto members = subgroup_of(group_, lists);
    return members ? std::make_unique<ShmTransport>(std::move(*members)) : nullptr;
  }

  std::unique_ptr<Transport> separate(const RankLists& lists, std::chrono::milliseconds timeout) override {
    queue_.make_all_calls();
    auto members = separate_group_of(group_, lists, timeout);
    return members ? std::make_unique<ShmTransport>(std::move(*members)) : nullptr;
  }

  torch::Tensor allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) override {
    return allocate_shared(group_, sizes, options);
  }

  std::optional<shm::Group> machine_group() override {
    queue_.make_all_calls();
    return whole_group_of(group_);
  }

  void fail(const std::string& reason) override { group_.poison(reason); }

 private:
  static shm::Send send_of(const torch::Tensor& tensor, int to, int tag) {
    return {.data = address(tensor), .count = elements(tensor), .dtype = dtype_of(tensor), .to = to, .tag = tag};
  }
  static shm::Receive receive_of(const torch::Tensor& tensor, int from, int tag) {
    return {.data = writable(tensor), .count = elements(tensor), .dtype = dtype_of(tensor), .from = from, .tag = tag};
  }

  std::shared_ptr<Pending> start_message(const torch::Tensor& tensor, shm::Call call) {
    queue_.hand_over();
    std::erase_if(messages_, [](const Message& message) { return message.work.done(); });
    messages_.push_back({tensor, group_.start(std::move(call))});
    return std::make_shared<MessageUnderWay>(messages_.back().work);
  }

  struct Message {
    torch::Tensor tensor;  // keeps the memory
    shm::Work work;
  };

  // Before the group, so that they outlive its threads.
  std::list<Message> messages_;
  Queue queue_{group_};
  shm::Group group_;
};

constexpr std::size_t kLongestAddress = 256;

// Every rank's address, where it has one, in rank order.
std::vector<std::string> exchange_addresses(shm::Group& group, const std::string& mine) {
  if (mine.size() >= kLongestAddress)
    throw SystemError({.what = "an address of shared memory that is too long: " + mine});
  std::string padded = mine;
  padded.resize(kLongestAddress);
  std::string all(kLongestAddress * static_cast<std::size_t>(group.size()), '\0');
  group.all_gather(
      {.input = padded.data(), .output = all.data(), .count = kLongestAddress, .dtype = shm::DType::kUInt8});
  std::vector<std::string> addresses;
  for (std::size_t i = 0; i < all.size(); i += kLongestAddress) addresses.emplace_back(all.c_str() + i);
  return addresses;
}

}  // namespace

shm::Group connect_shared_memory(const World& world, const std::vector<int>& ranks, const TransportOptions& options) {
  const shm::Options shm_options{.timeout = options.timeout, .job_ranks = ranks};
  const Deadline deadline = Deadline::after(options.timeout);
  const auto place = std::ranges::find(ranks, options.rank);
  const int size = static_cast<int>(ranks.size());
  std::optional<shm::Host> host;
  if (place == ranks.begin()) host.emplace(size, shm_options);
  const auto addresses = world.exchange_texts("the address of shared memory", host ? host->address() : "");
  if (host) return host->connect(deadline);
  const std::string& address = addresses[static_cast<std::size_t>(ranks.front())];
  return shm::join_host(address, static_cast<int>(place - ranks.begin()), size, deadline, shm_options);
}

std::optional<shm::Group> subgroup_of(shm::Group& group, const RankLists& lists) {
  const auto& mine = lists[static_cast<std::size_t>(group.rank())];
  const auto some = std::ranges::find_if(lists, [](const auto& list) { return !list.empty(); });
  if (some == lists.end()) return std::nullopt;
  return group.subgroup(mine.empty() ? *some : mine);  // who is in none takes part in making one
}

shm::Group whole_group_of(shm::Group& group) {
  std::vector<int> everyone(static_cast<std::size_t>(group.size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return std::move(*group.subgroup(everyone));
}

std::optional<shm::Group> separate_group_of(shm::Group& group, const RankLists& lists,
                                            std::chrono::milliseconds timeout) {
  const auto& mine = lists[static_cast<std::size_t>(group.rank())];
  shm::Options options{.timeout = timeout};
  for (const int member : mine) options.job_ranks.push_back(group.job_rank(member));
  const int size = static_cast<int>(mine.size());
  std::optional<shm::Host> host;
  if (size > 1 && mine.front() == group.rank()) host.emplace(size, options);
  const auto addresses = exchange_addresses(group, host ? host->address() : "");
  if (mine.empty()) return std::nullopt;
  if (size == 1) return std::move(shm::make_thread_group(1, options).front());
  if (host) return host->connect(Deadline::after(timeout));
  const auto place = static_cast<int>(std::ranges::find(mine, group.rank()) - mine.begin());
  return shm::join_host(addresses[static_cast<std::size_t>(mine.front())], place, size, Deadline::after(timeout),
                        options);
}

torch::Tensor allocate_shared(shm::Group& group, torch::IntArrayRef sizes, const torch::TensorOptions& options) {
  const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  auto memory = std::make_shared<shm::Memory>(group.allocate(bytes));
  return torch::from_blob(
      memory->data(), sizes, [memory](void*) mutable { memory.reset(); }, options);
}

std::unique_ptr<Transport> make_shared_memory(shm::Group group) {
  return std::make_unique<ShmTransport>(std::move(group));
}

std::vector<std::unique_ptr<Transport>> make_shared_memory_of_threads(int ranks, std::chrono::milliseconds timeout) {
  std::vector<std::unique_ptr<Transport>> transports;
  for (shm::Group& group : shm::make_thread_group(ranks, {.timeout = timeout}))
    transports.push_back(make_shared_memory(std::move(group)));
  return transports;
}

}  // namespace lockstep
