// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/shm/connect/rendezvous_server.h"

#include "lockstep/collective/shm/connect/handshake.h"
#include "lockstep/collective/shm/connect/local_socket.h"
#include "lockstep/collective/shm/connect/machine.h"
#include "lockstep/collective/shm/connect/socket_folder.h"
#include "lockstep/collective/shm/group_factory.h"
#include "lockstep/collective/shm/thresholds.h"

namespace lockstep::shm {
namespace {

namespace fs = std::filesystem;

std::size_t staging_bytes_of(const Options& options, int size) {
  return options.staging_bytes > 0 ? round_up(options.staging_bytes, kCacheLine) : chunk_bytes(size);
}

int job_rank_of(const Options& options, int rank) {
  return options.job_ranks.empty() ? rank : options.job_ranks[static_cast<unsigned>(rank)];
}

}  // namespace

RendezvousServer::RendezvousServer(int size, const Options& options) : size_(size), options_(options) {
  folder_ = make_socket_folder(folder_lock_);
  address_ = (folder_ / "socket").string();
  try {
    listener_ = listen_at(address_);
  } catch (...) {
    remove_folder();
    throw;
  }
}

RendezvousServer::~RendezvousServer() { remove_folder(); }

void RendezvousServer::remove_folder() {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
  folder_.clear();
  folder_lock_.reset();
}

Group RendezvousServer::connect(Deadline deadline) {
  Handles own = own_handles(0);
  UniqueFd control = make_control_segment(size_, staging_bytes_of(options_, size_));
  HandshakeServer handshake(listener_.get(), size_, deadline);
  handshake.wait_for_hellos();
  handshake.welcome(control.get(), own);
  const auto machine = std::make_shared<Machine>(handshake.take_parts(std::move(control), std::move(own.memory)));
  machine->take_seat(0, job_rank_of(options_, 0));
  handshake.wait_until_ready();
  listener_.reset();
  remove_folder();
  handshake.go();
  return GroupFactory::make(machine, 0, options_.timeout);
}

Group join_rendezvous(const std::string& address, int rank, int size, Deadline deadline, const Options& options) {
  HandshakeClient handshake(address, rank, size, deadline);
  const auto machine = std::make_shared<Machine>(handshake.exchange());
  machine->take_seat(rank, job_rank_of(options, rank));
  handshake.finish();
  return GroupFactory::make(machine, rank, options.timeout);
}

std::vector<Group> make_thread_group(int size, const Options& options) {
  MachineParts parts{.control = make_control_segment(size, staging_bytes_of(options, size)),
                     .memories = {},
                     .pidfds = {},
                     .share_ordinary_memory = options.share_ordinary_memory};
  for (int rank = 0; rank < size; ++rank) parts.memories.push_back(make_memory(rank));
  const auto machine = std::make_shared<Machine>(std::move(parts));
  for (int rank = 0; rank < size; ++rank) machine->take_seat(rank, job_rank_of(options, rank));
  std::vector<Group> groups;
  for (int rank = 0; rank < size; ++rank) groups.push_back(GroupFactory::make(machine, rank, options.timeout));
  return groups;
}

}  // namespace lockstep::shm
