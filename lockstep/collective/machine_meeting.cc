// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/machine_meeting.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "lockstep/base/hash.h"
#include "lockstep/base/port.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/job_store.h"
#include "lockstep/collective/shm/connect/local_socket.h"
#include "lockstep/collective/store/store_client.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

// Note [Meeting at a Unix socket]
// The ranks of a job know something in common that names the socket: the launcher, the scheduler's job, or MASTER_ADDR and
// MASTER_PORT, where nobody listens then. Rank 0 listens; it removes the socket when all ranks have connected, so a job
// that begins later with the same name does not find this one. The socket of a rank 0 that was killed refuses connections.

// A folder that only this user may enter, in XDG_RUNTIME_DIR if that exists (under Slurm it names a folder of the
// submitting machine), else in /tmp.
fs::path private_folder() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const bool exists = runtime != nullptr && fs::is_directory(runtime);
  const fs::path folder = fs::path(exists ? runtime : "/tmp") / concat("lockstep-", ::geteuid());
  ::mkdir(folder.c_str(), 0700);
  struct stat info {};
  if (::lstat(folder.c_str(), &info) != 0) throw system_error("make the folder", folder);
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 077) != 0)
    throw RendezvousError({.what = concat(folder.string(), " is not a folder that only this user can enter"),
                           .likely = "somebody else made it",
                           .next = "remove it, or set XDG_RUNTIME_DIR to a private folder"});
  return folder;
}

std::string common_name(const JobEnvironment& job) {
  return concat(job.job_id, " ", job.job_name, " ", job.master_addr, " ", job.master_port);
}

// Ids may be longer than a socket's path, so a hash stands for them; require_own_job tells apart what it does not.
fs::path path_of_socket(const JobEnvironment& job) {
  return private_folder() / concat("meeting-", hash_of(common_name(job)));
}

std::string where(const JobEnvironment& job) {
  if (job.master_addr.empty()) return concat("job ", job.job_id);
  return Endpoint{job.master_addr, job.master_port}.text();
}

// A connection to a rank 0 of this user that listens there; none if nobody does.
UniqueFd try_to_connect(const fs::path& path) {
  try {
    UniqueFd fd = connect_locally(path, SOCK_STREAM);
    if (is_own_user(fd.get())) return fd;
  } catch (const SystemError&) {  // not yet there, or its owner was killed
  }
  return {};
}

[[noreturn]] void refuse_second(const JobEnvironment& job, const UniqueFd& first) {
  ucred other{};
  socklen_t length = sizeof other;
  ::getsockopt(first.get(), SOL_SOCKET, SO_PEERCRED, &other, &length);
  throw RendezvousError({.what = concat("another rank 0 waits for its job at ", where(job)),
                         .here = concat("rank 0 of ", job.world_size),
                         .peer = concat("pid ", other.pid),
                         .likely = "two jobs with one MASTER_PORT",
                         .next = "choose another MASTER_PORT, or wait until the other job has begun"});
}

// Two first ranks that find an old socket at the same time take turns.
UniqueFd listen_for(const JobEnvironment& job, const fs::path& path) {
  const UniqueFd turn(::open(path.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!turn || ::flock(turn.get(), LOCK_EX) != 0) throw system_error("lock", path.parent_path());
  if (const UniqueFd first = try_to_connect(path)) refuse_second(job, first);
  ::unlink(path.c_str());
  return listen_locally(path, SOCK_STREAM);
}

std::unique_ptr<Channel> admit_own_user(UniqueFd fd) {
  return is_own_user(fd.get()) ? std::make_unique<Channel>(std::move(fd)) : nullptr;
}

c10::intrusive_ptr<c10d::Store> serve_on_machine(const JobEnvironment& job, milliseconds timeout) {
  const fs::path path = path_of_socket(job);
  auto server = std::make_shared<MeetingServer>(listen_for(job, path), &admit_own_user);
  const std::shared_ptr<void> removed_at_exit(nullptr, [&path](void*) { ::unlink(path.c_str()); });
  auto client = std::make_shared<MeetingClient>(std::make_unique<Channel>(server->own_connection()));
  auto store = c10::make_intrusive<MeetingStore>(std::move(client), server, timeout);
  require_own_job(*store, where(job), job);
  wait_for_everyone(*store, where(job), job, Deadline::after(timeout));
  server->stop_listening();
  return store;
}

c10::intrusive_ptr<c10d::Store> join_on_machine(const JobEnvironment& job, milliseconds timeout) {
  const fs::path path = path_of_socket(job);
  const Deadline deadline = Deadline::after(timeout);
  for (; !deadline.passed(); std::this_thread::sleep_for(kRetryEvery)) {
    UniqueFd fd = try_to_connect(path);
    if (!fd) continue;
    auto client = std::make_shared<MeetingClient>(std::make_unique<Channel>(std::move(fd)));
    if (!client->hello(deadline)) continue;
    auto store = c10::make_intrusive<MeetingStore>(std::move(client), nullptr, timeout);
    require_own_job(*store, where(job), job);
    wait_for_everyone(*store, where(job), job, deadline);
    return store;
  }
  throw RendezvousError(
      {.what = concat("rank ", job.rank, " found no rank 0 of ", where(job), " on this machine"),
       .here = path.string(),
       .likely = "rank 0 did not start, died early, runs on another machine or as another user",
       .next = "look at rank 0's output; on several machines set MASTER_ADDR and MASTER_PORT for all ranks"});
}

}  // namespace

bool is_on_one_machine(const JobEnvironment& job) {
  if (job.local_size != job.world_size) return false;
  return job.launcher != "address" || is_loopback(job.master_addr);  // by an address alone nobody knows
}

c10::intrusive_ptr<c10d::Store> meet_on_machine(const JobEnvironment& job, milliseconds timeout) {
  return job.rank == 0 ? serve_on_machine(job, timeout) : join_on_machine(job, timeout);
}

}  // namespace lockstep
