// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/transport/cpu_transport.h"

#include <numeric>

#include "lockstep/base/text.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"

namespace lockstep {
namespace {

std::string missing_ranks(c10d::Store& store, const std::vector<std::string>& keys) try {
  std::vector<std::string> missing;
  for (size_t rank = 0; rank < keys.size(); ++rank)
    if (!store.check({keys[rank]})) missing.push_back(std::to_string(rank));
  return join(missing, ", ");
} catch (const std::exception&) {
  return "0, which keeps the store";
}

// Every rank's address, where it has one, in rank order.
std::vector<std::string> exchange_addresses(shm::Group& group, const std::string& mine) {
  using Padded = std::array<char, 256>;
  Padded padded{};
  if (mine.size() >= padded.size())
    throw SystemError({.what = "an address of shared memory that is too long: " + mine});
  std::ranges::copy(mine, padded.begin());
  std::vector<Padded> all(to_size(group.size()));
  group.run({.operation = Operation::kAllGather,
             .input = &padded,
             .output = all.data(),
             .count = sizeof padded,
             .dtype = DType::kUInt8});
  std::vector<std::string> addresses;
  for (const Padded& address : all) addresses.emplace_back(address.data());
  return addresses;
}

// Connects `ranks`, none where they are no ranks; `rank` is this one. `exchange` gives the addresses of all ranks for
// this one's, which only the first of each list has.
template <class Exchange>
shm::GroupPtr connect_ranks(const std::vector<int>& ranks, int rank, const shm::Options& options,
                            const Exchange& exchange) {
  const int size = to_int(ranks.size());
  std::optional<shm::RendezvousServer> server;
  if (size > 0 && ranks.front() == rank) server.emplace(size, options);
  const std::vector<std::string> addresses = exchange(server ? server->address() : "");
  if (size == 0) return nullptr;
  const Deadline deadline = Deadline::after(options.timeout);
  if (server) return server->connect(deadline);
  return shm::join_rendezvous(addresses[to_size(ranks.front())], index_of(ranks, rank), size, deadline, options);
}

}  // namespace

CpuTransport::~CpuTransport() {
  if (std::uncaught_exceptions() > 0) {
    inside->cancel();
    return;
  }
  try {
    queue_.drain();
    inside->leave();
  } catch (const std::exception&) {  // a rank is lost: the others know
  }
}

int CpuTransport::run(const TensorCall& call) {
  if (is_message(call.operation)) {
    prepare_message();
    return inside->run(call);
  }
  const CallQueue::Turn turn(queue_);
  return inside->run(call);
}

FuturePtr CpuTransport::start(TensorCall call) {
  if (!is_message(call.operation)) {
    check_call(call, inside->size());  // now, and not when a later call begins this one
    return queue_.add([this, call = std::move(call)] { inside->run(call); });
  }
  prepare_message();
  const std::lock_guard lock(mutex_);
  FuturePtr future = inside->start(call);
  messages_.push_back({std::move(call), future});
  return future;
}

void CpuTransport::prepare_message() {
  queue_.hand_to_worker();
  const std::lock_guard lock(mutex_);
  std::erase_if(messages_, [](const Message& message) { return message.future->done(); });
}

std::unique_ptr<Transport> CpuTransport::group(const std::vector<int>& ranks, std::optional<milliseconds> separate) {
  queue_.run_all();
  auto members = group_inside(ranks, separate);
  return members ? std::make_unique<CpuTransport>(std::move(members)) : nullptr;
}

shm::GroupPtr CpuTransport::group_inside(const std::vector<int>& ranks, std::optional<milliseconds> separate) const {
  if (!separate) return inside->subgroup(ranks);
  shm::Options options{.timeout = *separate};
  for (const int member : ranks) options.job_ranks.push_back(inside->job_rank(member));
  return connect_ranks(ranks, inside->rank(), options,
                       [&](const std::string& address) { return exchange_addresses(*inside, address); });
}

torch::Tensor CpuTransport::allocate(torch::IntArrayRef sizes, const torch::TensorOptions& options) {
  const auto bytes = static_cast<uint64_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  auto memory = std::make_shared<shm::Memory>(inside->allocate(bytes));
  return torch::from_blob(
      memory->data(), sizes, [memory](void*) mutable { memory.reset(); }, options);
}

shm::GroupPtr CpuTransport::machine_group() {
  queue_.run_all();
  return whole_group_of(*inside);
}

void CpuTransport::set_timeout(milliseconds timeout) {
  queue_.run([&] { inside->set_timeout(timeout); });
}

std::vector<std::string> exchange_texts(c10d::Store& store, const std::string& topic, const std::string& mine,
                                        const TransportOptions& options) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < options.size; ++rank) keys.push_back(concat("lockstep/", topic, "/", rank));
  std::vector<std::string> texts;
  try {
    store.set(keys[to_size(options.rank)], mine);
    store.wait(keys, options.timeout);
    for (const std::string& key : keys) texts.push_back(store.get_to_str(key));
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw RendezvousError(
        {.what = concat("not all ranks have come: no ", topic, " from rank ", missing_ranks(store, keys)),
         .here = options.describe,
         .likely = "that rank died, or does not make the same calls in the same order",
         .next = "look at its output"});
  }
  return texts;
}

shm::GroupPtr connect_shared_memory(c10d::Store& store, const std::vector<int>& ranks,
                                    const TransportOptions& options) {
  return connect_ranks(ranks, options.rank, {.timeout = options.timeout, .job_ranks = ranks},
                       [&](const std::string& mine) { return exchange_texts(store, "address", mine, options); });
}

shm::GroupPtr whole_group_of(shm::Group& group) {
  std::vector<int> everyone(to_size(group.size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return group.subgroup(everyone);
}

}  // namespace lockstep
