// SPDX-License-Identifier: Apache-2.0
#include "lockstep/collective/rendezvous_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/job_store.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr const char* kLoopbackAddress = "127.0.0.1";

// Note [Rendezvous through a file]
// mpirun and srun give the ranks of a job a common id but no port. Rank 0 listens on a free port and writes the port,
// its pid and that process's start time into a file named after the job. The others poll the file until it names a
// process that is alive and was started at that time, so a file left by a killed job is ignored. Rank 0 removes the file
// when all ranks have connected.

// A folder that only this user may enter, in XDG_RUNTIME_DIR if that exists (under Slurm it names a folder of the
// submitting machine), else in /tmp.
fs::path private_folder() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const bool exists = runtime != nullptr && fs::is_directory(runtime);
  const fs::path folder = fs::path(exists ? runtime : "/tmp") / concat("lockstep-", ::getuid());
  ::mkdir(folder.c_str(), 0700);
  struct stat info {};
  if (::lstat(folder.c_str(), &info) != 0) throw system_error("make the folder", folder);
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::getuid() || (info.st_mode & 077) != 0)
    throw RendezvousError({.what = concat(folder.string(), " is not a folder that only this user can enter"),
                           .likely = "somebody else made it",
                           .next = "remove it, or set XDG_RUNTIME_DIR to a private folder"});
  return folder;
}

fs::path rendezvous_file(const JobEnvironment& job) {
  std::string name = job.job_id;
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return private_folder() / concat("job-", name);
}

bool is_running(pid_t pid, const std::string& started) {
  try {
    return start_time_of(pid) == started;
  } catch (const SystemError&) {
    return false;
  }
}

std::optional<int> port_of_living_rank0(const fs::path& file) {
  std::ifstream in(file);
  int port = 0;
  pid_t pid = 0;
  std::string started;
  if (!(in >> port >> pid >> started)) return std::nullopt;
  return is_running(pid, started) ? std::optional<int>(port) : std::nullopt;
}

int wait_for_port(const fs::path& file, const JobEnvironment& job, const Deadline& deadline) {
  for (;;) {
    if (const auto port = port_of_living_rank0(file)) return *port;
    if (deadline.passed())
      throw RendezvousError({.what = concat("rank ", job.rank, " of job ", job.job_id, " found no rank 0"),
                             .here = file.string(),
                             .likely = "rank 0 did not start, or runs on another machine",
                             .next = "on several machines set MASTER_ADDR and MASTER_PORT for all ranks"});
    std::this_thread::sleep_for(kRetryEvery);
  }
}

void wait_for_everyone(c10d::Store& store, const JobEnvironment& job, const Deadline& deadline) {
  while (store.add("joined", 0) < job.world_size - 1) {
    if (deadline.passed())
      throw RendezvousError({.what = concat("only ", store.add("joined", 0) + 1, " of ", job.world_size, " ranks came"),
                             .likely = "a rank died before it got here, or runs on another machine",
                             .next = "look at the other ranks' output; on several machines set MASTER_ADDR"});
    std::this_thread::sleep_for(kRetryEvery);
  }
}

c10::intrusive_ptr<c10d::Store> serve_through_file(const JobEnvironment& job, milliseconds timeout) {
  UniqueFd listener = listen_on({kLoopbackAddress, 0}, Deadline::after(timeout));
  const int port = endpoint_of(listener).port;
  auto store = serve_store(std::move(listener), timeout);
  const fs::path file = rendezvous_file(job);
  const std::shared_ptr<void> removed_at_exit(nullptr, [&file](void*) { ::unlink(file.c_str()); });
  write_file(file, concat(port, " ", ::getpid(), " ", start_time_of(::getpid()), "\n"));
  wait_for_everyone(*store, job, Deadline::after(timeout));
  return store;
}

c10::intrusive_ptr<c10d::Store> join_through_file(const JobEnvironment& job, milliseconds timeout) {
  const int port = wait_for_port(rendezvous_file(job), job, Deadline::after(timeout));
  auto store = join_store({kLoopbackAddress, port}, job, timeout);
  store->add("joined", 1);
  return store;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_through_file(const JobEnvironment& job, milliseconds timeout) {
  return job.rank == 0 ? serve_through_file(job, timeout) : join_through_file(job, timeout);
}

}  // namespace lockstep
