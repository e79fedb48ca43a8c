// SPDX-License-Identifier: Apache-2.0
// agent/clusters/pmi.cc: the texts that MPICH's mpirun (Hydra) keeps for its ranks, by version 1 of its protocol PMI: lines of
// "cmd=NAME key=value …" over the socket PMI_FD, each answered by a line.
//
// Flow:    open_launcher_store() -> here <-> the proxy that started this rank
// Owns:    nothing: the socket stays open for an MPI in this process. So neither init nor finalize is sent, which Hydra
//          takes from one user only
// Threads: one at a time, and none that is inside MPI
#include "agent/clusters/launcher_store.h"

#include <sys/socket.h>

#include "lockstep/base/process/environment_switch.h"
#include "lockstep/base/sockets/poll.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

// One line. It comes in one piece: mpirun's proxy answers nothing else before the next question.
std::string read_line(int fd, const Deadline& deadline) {
  std::string line;
  for (char letter = 0; letter != '\n'; line += letter) {
    if (!wait_for(POLLIN, fd, deadline)) throw mpirun_error("no answer from mpirun through PMI_FD before the deadline");
    if (::recv(fd, &letter, 1, 0) != 1) throw mpirun_error("mpirun has closed PMI_FD");
  }
  return line.substr(0, line.size() - 1);
}

// "cmd=get_result rc=0 value=x" -> value -> "x"
std::string value_in(const std::string& line, const std::string& key) {
  for (const std::string& part : split(line, ' '))
    if (part.starts_with(key + "=")) return part.substr(key.size() + 1);
  return "";
}

class PmiStore final : public LauncherStore {
 public:
  explicit PmiStore(milliseconds timeout)
      : fd_(number_in_variable("PMI_FD", -1)), rank_(number_in_variable("PMI_RANK", -1)), timeout_(timeout) {
    space_ = value_in(ask("cmd=get_my_kvsname", "my_kvsname"), "kvsname");
  }

  void exchange(const std::string& mine) override {
    name_ = next_name();
    ask(concat("cmd=put kvsname=", space_, " key=", name_, "-", rank_, " value=", mine), "put_result");
    ask("cmd=barrier_in", "barrier_out");
  }

  std::string text_of(int rank) override {
    const std::string answer = ask(concat("cmd=get kvsname=", space_, " key=", name_, "-", rank), "get_result");
    if (value_in(answer, "rc") == "0") return value_in(answer, "value");
    throw mpirun_error(concat("rank ", rank, " has given no text to PMI_FD"));
  }

 private:
  std::string ask(const std::string& command, const std::string& wanted) {
    const std::string line = command + "\n";
    if (::send(fd_, line.data(), line.size(), MSG_NOSIGNAL) != std::ssize(line))
      throw mpirun_error("can't write to PMI_FD");
    const std::string answer = read_line(fd_, Deadline::after(timeout_));
    if (value_in(answer, "cmd") != wanted)
      throw mpirun_error(concat("mpirun answered \"", answer, "\" through PMI_FD"));
    return answer;
  }

  int fd_;
  int rank_;
  milliseconds timeout_;
  std::string space_;  // where Hydra keeps the texts of this job
  std::string name_;
};

}  // namespace

std::unique_ptr<LauncherStore> open_pmi(milliseconds timeout) { return std::make_unique<PmiStore>(timeout); }

}  // namespace lockstep
