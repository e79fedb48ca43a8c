// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/c10d/backend_connect.h"

#include <string>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/collective/shm/connect/rendezvous_server.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep::backend {
namespace {

// Blocks until the keys are there: with our timeout and our error, not with the store's.
void wait_for(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::milliseconds timeout, int rank,
              int size) {
  try {
    store.wait(keys, timeout);
  } catch (const std::exception& error) {
    throw RendezvousError({.what = concat("not all ranks have come: ", split(error.what(), '\n').front()),
                           .here = concat("rank ", rank, " of ", size),
                           .likely = "a rank that died, or does not make this process group",
                           .next = "look at the other ranks' output"});
  }
}

// The text of every rank, through the store.
std::vector<std::string> exchange(c10d::Store& store, const std::string& topic, const std::string& mine, int rank,
                                  int size, std::chrono::milliseconds timeout) {
  std::vector<std::string> keys;
  for (int i = 0; i < size; ++i) keys.push_back(concat("lockstep/", topic, "/", i));
  store.set(keys[to_size(rank)], mine);
  wait_for(store, keys, timeout, rank, size);
  std::vector<std::string> texts;
  for (const std::string& key : keys) texts.push_back(store.get_to_str(key));
  return texts;
}

void require_one_machine(const std::vector<std::string>& machines, int rank) {
  const std::string& mine = machines[to_size(rank)];
  for (std::size_t other = 0; other < machines.size(); ++other)
    if (machines[other] != mine)
      throw RendezvousError({.what = concat("ranks ", rank, " and ", other, " run on different machines"),
                             .here = concat("rank ", rank, " of ", machines.size()),
                             .likely = "a job over several machines: the lockstep backend shares memory within one",
                             .next = "use \"gloo\" for this process group"});
}

}  // namespace

shm::Group connect(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout) {
  const std::string machine = read_file("/proc/sys/kernel/random/boot_id");
  require_one_machine(exchange(store, "machine", machine, rank, size, timeout), rank);
  const Deadline deadline = Deadline::after(timeout);
  const shm::Options options{.timeout = timeout};
  const std::string address = "lockstep/address";
  if (rank > 0) {
    wait_for(store, {address}, timeout, rank, size);
    return shm::join_rendezvous(store.get_to_str(address), rank, size, deadline, options);
  }
  shm::RendezvousServer server(size, options);
  store.set(address, server.address());
  return server.connect(deadline);
}

}  // namespace lockstep::backend
