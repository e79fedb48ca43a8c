// SPDX-License-Identifier: Apache-2.0
#include "agent/recover/job_memory.h"

#include <poll.h>

#include <cstdlib>
#include <optional>

#include "lockstep/base/process/environment_switch.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr const char* kAddress = "LOCKSTEP_KEEPER";
constexpr std::chrono::seconds kToAnswer{60};  // the launcher answers at once, unless it was stopped

// Returns nothing if the launcher is gone, or has not answered in time.
std::optional<Packet> receive_from_keeper(int socket, std::vector<UniqueFd>& descriptors, Deadline deadline) {
  Packet packet;
  Incoming incoming = Incoming::kNothingYet;
  while (incoming == Incoming::kNothingYet && wait_for(POLLIN, socket, deadline))
    incoming = receive_packet(socket, packet, descriptors);
  return incoming == Incoming::kMessage ? std::optional(packet) : std::nullopt;
}

SystemError keeper_lost(const std::string& what) {
  return SystemError({.what = concat("the launcher ", what),
                      .here = kAddress,
                      .likely = "the launcher was killed or stopped",
                      .next = "start the job again with --resume"});
}

// "@NAME SEAT"
UniqueFd connect_to_keeper(const std::string& address) {
  UniqueFd socket = connect_locally(address.substr(0, address.find(' ')));
  if (!is_own_user(socket.get()))
    throw SystemError(
        {.what = "the launcher's socket belongs to another user", .here = kAddress, .next = "start the job again"});
  return socket;
}

}  // namespace

JobMemory::JobMemory(const std::string& address) : socket_(connect_to_keeper(address)) {
  parse_int(split(address, ' ').back(), seat_);
  set_place();
}

void JobMemory::set_place() {
  local_rank_ = number_in_variable("LOCAL_RANK");
  generation_ = number_in_variable("TORCHELASTIC_RESTART_COUNT");
}

JobMemory* JobMemory::get() {
  static std::mutex mutex;
  static JobMemory* instance = nullptr;  // lives as long as the process
  const std::lock_guard lock(mutex);
  const char* const address = std::getenv(kAddress);
  if (address == nullptr || *address == '\0') return nullptr;
  if (instance == nullptr) instance = new JobMemory(address);
  return instance->process_.is_here() ? instance : nullptr;
}

void JobMemory::send(Packet::Kind kind, std::vector<std::string> texts, const std::vector<int>& descriptors) const {
  if (!send_packet(socket_.get(), {kind, generation_, std::move(texts)}, Deadline::after(kToAnswer), descriptors))
    throw keeper_lost("does not take this rank's messages");
}

void JobMemory::keep(const std::string& name, int fd) {
  const std::lock_guard lock(mutex_);
  send(Packet::Kind::kKeep, {concat(local_rank_), name}, {fd});
}

std::vector<JobMemory::Kept> JobMemory::previous() {
  const std::lock_guard lock(mutex_);
  send(Packet::Kind::kFetch, {});
  const auto deadline = Deadline::after(kToAnswer);
  std::vector<Kept> all;
  for (;;) {
    std::vector<UniqueFd> descriptors;
    const auto packet = receive_from_keeper(socket_.get(), descriptors, deadline);
    int local_rank = 0;
    if (!packet) throw keeper_lost("does not answer");
    if (packet->kind != Packet::Kind::kKeep || descriptors.size() != 1) return all;
    if (parse_int(packet->texts.at(0), local_rank))
      all.push_back({packet->texts.at(1), local_rank, std::move(descriptors.front())});
  }
}

void JobMemory::tell(Packet::Kind kind) {
  const std::lock_guard lock(mutex_);
  send(kind, {concat(seat_)});
}

bool JobMemory::next_generation(milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  send(Packet::Kind::kNext, {concat(seat_)});
  std::vector<UniqueFd> none;
  const auto packet = receive_from_keeper(socket_.get(), none, Deadline::after(timeout));
  if (!packet) return false;
  for (size_t i = 0; i + 1 < packet->texts.size(); i += 2)
    ::setenv(packet->texts[i].c_str(), packet->texts[i + 1].c_str(), 1);
  set_place();
  return true;
}

}  // namespace lockstep
