// SPDX-License-Identifier: Apache-2.0
// A rank to test launchers with: `rank_probe WHAT [ARGUMENTS]` does one thing that a rank may do, named by WHAT.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/deadline.h"

namespace {

using Arguments = std::vector<std::string>;
using lockstep::concat;
using lockstep::UniqueFd;

constexpr auto kPatience = std::chrono::seconds(10);

std::string variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? "(not set)" : value;
}

int rank() { return std::stoi(variable("RANK")); }

[[noreturn]] void hang() {
  for (;;) ::pause();
}

// Tells the test that process `pid` has come to the point where it hangs.
void announce(const std::string& folder, const std::string& name, pid_t pid) {
  lockstep::write_file(std::filesystem::path(folder) / name, concat(pid));
}

// VARIABLE… -> "VARIABLE=value …"
int print_variables(const Arguments& names) {
  std::string line;
  for (const std::string& name : names) line += concat(name, "=", variable(name), " ");
  std::cout << line << "cores=" << lockstep::to_string(lockstep::usable_cores()) << '\n';
  return 0;
}

int hang_in(const Arguments& folder) {
  announce(folder.at(0), concat("rank", rank()), ::getpid());
  hang();
}

int ignore_sigterm(const Arguments& folder) {
  ::signal(SIGTERM, SIG_IGN);
  ::signal(SIGINT, SIG_IGN);
  return hang_in(folder);
}

// SIGTERM makes it write FOLDER/rankN.stopped and exit with 0.
int exit_on_sigterm(const Arguments& folder) {
  sigset_t term;
  ::sigemptyset(&term);
  ::sigaddset(&term, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &term, nullptr);
  announce(folder.at(0), concat("rank", rank()), ::getpid());
  int signal = 0;
  ::sigwait(&term, &signal);
  announce(folder.at(0), concat("rank", rank(), ".stopped"), ::getpid());
  return 0;
}

// RANK CODE LINES: that rank writes lines to stderr and exits; the others hang.
int fail(const Arguments& arguments) {
  if (rank() != std::stoi(arguments.at(0))) hang();
  for (int i = 0; i < std::stoi(arguments.at(2)); ++i) std::cerr << "line " << i << '\n';
  return std::stoi(arguments.at(1));
}

// RANK SIGNAL: that rank ends itself by a signal; the others hang.
int end_by_signal(const Arguments& arguments) {
  if (rank() != std::stoi(arguments.at(0))) hang();
  ::signal(std::stoi(arguments.at(1)), SIG_DFL);
  ::raise(std::stoi(arguments.at(1)));
  return 0;
}

pid_t start_grandchild(const std::string& folder, bool leave_group) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  if (leave_group) ::setsid();
  announce(folder, concat("grandchild", rank()), ::getpid());
  hang();
}

int hang_with_grandchild(const Arguments& folder) {
  start_grandchild(folder.at(0), false);
  return hang_in(folder);
}

// Ends while a process that is out of the launcher's reach keeps its stdout and stderr open.
int leave_grandchild(const Arguments& folder) {
  start_grandchild(folder.at(0), true);
  const auto deadline = lockstep::Deadline::after(kPatience);
  const auto file = std::filesystem::path(folder.at(0)) / concat("grandchild", rank());
  while (!std::filesystem::exists(file) && !deadline.passed()) std::this_thread::yield();
  std::cout << "last words" << std::endl;
  return 0;
}

int print_lines(const Arguments& arguments) {
  for (int i = 0; i < std::stoi(arguments.at(0)); ++i) std::cout << "line " << i << " of rank " << rank() << ";\n";
  return 0;
}

int print_long_line(const Arguments& arguments) {
  std::cout << std::string(std::stoul(arguments.at(0)), 'x');
  return 0;
}

int print_bytes(const Arguments&) {
  for (int byte = 0; byte < 256; ++byte) std::cout << static_cast<char>(byte);
  return 0;
}

sockaddr_in master_address() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(variable("MASTER_PORT"))));
  ::inet_pton(AF_INET, variable("MASTER_ADDR").c_str(), &address.sin_addr);
  return address;
}

int serve(sockaddr_in address) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || ::listen(fd.get(), 8) != 0)
    return 1;
  for (int peers = std::stoi(variable("WORLD_SIZE")) - 1; peers > 0; --peers)
    if (!UniqueFd(::accept(fd.get(), nullptr, nullptr))) return 1;
  return 0;
}

int connect_to(sockaddr_in address) {
  for (const auto deadline = lockstep::Deadline::after(kPatience); !deadline.passed(); std::this_thread::yield()) {
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM, 0));
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return 0;
  }
  return 1;
}

// Rank 0 listens on MASTER_PORT and the others connect.
int meet(const Arguments&) { return rank() == 0 ? serve(master_address()) : connect_to(master_address()); }

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, int (*)(const Arguments&)> actions = {
      {"variables", print_variables},
      {"hang", hang_in},
      {"ignore-sigterm", ignore_sigterm},
      {"exit-on-sigterm", exit_on_sigterm},
      {"fail", fail},
      {"end-by-signal", end_by_signal},
      {"hang-with-grandchild", hang_with_grandchild},
      {"leave-grandchild", leave_grandchild},
      {"lines", print_lines},
      {"long-line", print_long_line},
      {"bytes", print_bytes},
      {"meet", meet},
  };
  return actions.at(argv[1])(Arguments(argv + 2, argv + argc));
}
