// SPDX-License-Identifier: Apache-2.0
#include "agent/recover/job_memory.h"

#include <poll.h>

#include <cstdlib>
#include <optional>

#include "lockstep/base/process/environment_switch.h"
#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr const char* kAddress = "LOCKSTEP_KEEPER";
constexpr std::chrono::seconds kToAnswer{60};  // the launcher answers at once, unless it was stopped

// Returns nothing if the launcher is gone, or has not answered in time.
std::optional<KeeperMessage> receive_from_keeper(int socket, std::vector<UniqueFd>& descriptors, Deadline deadline) {
  KeeperMessage message;
  for (;;) {
    if (!wait_for(POLLIN, socket, deadline)) return {};
    const Incoming incoming = receive_message(socket, message, descriptors);
    if (incoming != Incoming::kNothingYet)
      return incoming == Incoming::kMessage ? std::optional(message) : std::nullopt;
  }
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

void set_variables(const std::string& lines) {
  for (const std::string& line : split(lines, '\n'))
    if (const std::size_t equals = line.find('='); equals != std::string::npos)
      ::setenv(line.substr(0, equals).c_str(), line.substr(equals + 1).c_str(), 1);
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

void JobMemory::send(KeeperMessage message, const std::vector<int>& descriptors) const {
  message.seat = seat_;
  message.local_rank = local_rank_;
  message.generation = generation_;
  if (!send_message(socket_.get(), message, Deadline::after(kToAnswer), descriptors))
    throw keeper_lost("does not take this rank's messages");
}

void JobMemory::keep(const std::string& name, int fd) {
  const std::lock_guard lock(mutex_);
  KeeperMessage message{.kind = KeeperMessage::kKeep};
  message.set_text(name);
  send(message, {fd});
}

std::vector<JobMemory::Kept> JobMemory::previous() {
  const std::lock_guard lock(mutex_);
  send({.kind = KeeperMessage::kFetch});
  const auto deadline = Deadline::after(kToAnswer);
  std::vector<Kept> all;
  for (;;) {
    std::vector<UniqueFd> descriptors;
    const auto message = receive_from_keeper(socket_.get(), descriptors, deadline);
    if (!message) throw keeper_lost("does not answer");
    if (message->kind != KeeperMessage::kKept || descriptors.size() != 1) return all;
    all.push_back({message->get_text(), message->local_rank, message->generation, std::move(descriptors.front())});
  }
}

void JobMemory::tell(KeeperMessage::Kind kind) {
  const std::lock_guard lock(mutex_);
  send({.kind = kind});
}

bool JobMemory::next_generation(milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  send({.kind = KeeperMessage::kNext});
  std::vector<UniqueFd> none;
  const auto message = receive_from_keeper(socket_.get(), none, Deadline::after(timeout));
  if (!message || message->kind != KeeperMessage::kGeneration) return false;
  set_variables(message->get_text());
  set_place();
  return true;
}

}  // namespace lockstep
