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
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "agent/clusters/environment.h"
#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/cores.h"
#include "lockstep/deadline.h"
#include "lockstep/observe/phase_scope.h"
#include "lockstep/observe/trace.h"

// What a debugger must find in the stack of a rank that hangs.
extern "C" {

[[gnu::noinline]] void spin_for_ever() {
  for (volatile bool on = true; on;) {
  }
}

[[gnu::noinline]] void wait_for_the_second_mutex(std::mutex& second) { const std::lock_guard lock(second); }
}

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
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(variable("MASTER_PORT"))));
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

// ---- Ranks that publish what they do

namespace observe = lockstep::observe;
using lockstep::Phase;

// The ranks of this job, which all publish. A record of the generation before may still be there: its process has ended.
int pid_of(int peer) {
  const lockstep::JobPage page = lockstep::JobPage::open(lockstep::split(variable("LOCKSTEP_PAGE"), ' ').front());
  const lockstep::RankRecord& record = page.record(peer);
  while (record.generation != observe::record().generation || record.pid == 0) std::this_thread::yield();
  return record.pid;
}

// As ranks do in a collective, until `done`.
template <class Done>
int wait_for_rank(int rank, const Done& done) {
  const int peer = pid_of(rank);
  observe::enter(Phase::kExchange);
  {
    const observe::WaitScope wait(peer, rank);
    for (; !done(); wait.goes_on()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  observe::enter(Phase::kOwnCode);
  return 0;
}

int wait_for_ever(int rank) {
  return wait_for_rank(rank, [] { return false; });
}

// Two threads, each with the mutex that the other one wants.
[[noreturn]] void deadlock() {
  std::mutex first, second;
  std::atomic<int> holding{0};
  const auto take = [&](std::mutex& mine, std::mutex& other) {
    const std::lock_guard lock(mine);
    ++holding;
    while (holding < 2) std::this_thread::yield();
    wait_for_the_second_mutex(other);
  };
  std::thread other(take, std::ref(second), std::ref(first));
  take(first, second);
  hang();
}

// HOW: rank 1 stands still in the forward of step 17, while the others wait for it.
int stand_still(const Arguments& how) {
  observe::begin_step(17);
  if (rank() != 1) return wait_for_ever(1);
  observe::enter(Phase::kForward);
  if (how.at(0) == "loop") spin_for_ever();
  if (how.at(0) == "deadlock") deadlock();
  if (how.at(0) == "stop") ::raise(SIGSTOP);
  hang();
}

// FOLDER: rank 1 is stopped until the test continues it; then all end.
int be_stopped_for_a_while(const Arguments& folder) {
  observe::begin_step(17);
  const auto file = std::filesystem::path(folder.at(0)) / "continued";
  if (rank() != 1) return wait_for_rank(1, [&] { return std::filesystem::exists(file); });
  observe::enter(Phase::kForward);
  announce(folder.at(0), "rank1", ::getpid());
  ::raise(SIGSTOP);
  announce(folder.at(0), "continued", ::getpid());
  return 0;
}

// FOLDER: rank 1 computes, once FOLDER/debugged is there, until FOLDER/go-on is; the others wait for it.
int hold_up(const Arguments& folder) {
  const auto wait_for = [&](const char* name) {
    while (!std::filesystem::exists(std::filesystem::path(folder.at(0)) / name))
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  if (rank() == 1) announce(folder.at(0), "rank1", ::getpid());
  wait_for("debugged");
  observe::begin_step(17);
  const auto file = std::filesystem::path(folder.at(0)) / "go-on";
  if (rank() != 1) return wait_for_rank(1, [&] { return std::filesystem::exists(file); });
  observe::enter(Phase::kForward);
  wait_for("go-on");
  return 0;
}

// FOLDER: rank 0 saves to FOLDER/disk, a FIFO, and ends. The others wait for it until FOLDER/saved is there.
int save_slowly(const Arguments& folder) {
  observe::begin_step(17);
  const auto file = std::filesystem::path(folder.at(0)) / "saved";
  if (rank() != 0) return wait_for_rank(0, [&] { return std::filesystem::exists(file); });
  const lockstep::PhaseScope saving(Phase::kSaving);
  announce(folder.at(0), "saving", ::getpid());
  std::ofstream(std::filesystem::path(folder.at(0)) / "disk") << "a checkpoint";  // blocks until somebody reads
  return 0;
}

// Each rank waits for the next one.
int wait_in_a_circle(const Arguments&) {
  observe::begin_step(17);
  return wait_for_ever((rank() + 1) % std::stoi(variable("WORLD_SIZE")));
}

// MILLISECONDS: computes for so long, and takes steps meanwhile.
int take_steps(const Arguments& arguments) {
  if (const char* const rank = std::getenv("RANK"); rank != nullptr && *rank != '\0') {  // as World does
    const auto job = lockstep::read_job_environment();
    observe::meets({job.rank, job.world_size, job.job_id, job.node_rank});
  }
  const lockstep::Stopwatch watch;
  for (int step = 0; watch.seconds() < std::stod(arguments.at(0)) / 1000; ++step) {
    observe::begin_step(step);
    const lockstep::PhaseScope forward(Phase::kForward);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return 0;
}

// ---- Ranks for `lockstep top`, until they are ended

using std::chrono::milliseconds;

void compute_for(milliseconds time) {
  const lockstep::PhaseScope forward(Phase::kForward);
  std::this_thread::sleep_for(time);
}

// Rank 1 computes four times as long as the others, which wait for it.
int straggle(const Arguments&) {
  const int slow = pid_of(1);
  for (int step = 0;; ++step) {
    observe::begin_step(step);
    const lockstep::trace::Span span("step", step);
    compute_for(milliseconds(rank() == 1 ? 20 : 5));
    const lockstep::PhaseScope exchange(Phase::kExchange);
    if (rank() != 1) {
      const observe::WaitScope wait(slow, 1);
      std::this_thread::sleep_for(milliseconds(15));
    }
    observe::finish_step(32, 0.5);
  }
}

// Two thirds of the time go into loading, with one worker.
int wait_for_data(const Arguments&) {
  observe::has_loader(1);
  for (int step = 0;; ++step) {
    observe::begin_step(step);
    compute_for(milliseconds(5));
    const lockstep::PhaseScope loading(Phase::kLoading);
    std::this_thread::sleep_for(milliseconds(10));
  }
}

// As a rank does in a step of `ddp`.
void publish_step(int step) {
  observe::begin_step(step);
  for (const Phase phase : {Phase::kLoading, Phase::kForward, Phase::kBackward, Phase::kExchange, Phase::kUpdate}) {
    const lockstep::PhaseScope during(phase);
    if (phase < Phase::kBackward) continue;
    observe::moved();
    const observe::WaitScope wait(1, 1);
  }
  observe::finish_step(32, 0.5);
}

// STEPS [BYTES]: publishes in so many steps, before each of which it uses so much other memory, and prints what that
// takes, in ns of a step.
int publish(const Arguments& arguments) {
  const int steps = std::stoi(arguments.at(0));
  std::vector<char> other(arguments.size() > 1 ? std::stoul(arguments.at(1)) : 0);
  if (other.empty()) {
    const lockstep::Stopwatch watch;
    for (int step = 0; step < steps; ++step) publish_step(step);
    std::cout << watch.seconds() / steps * 1e9 << '\n';
    return 0;
  }
  int64_t sum = 0;
  for (int step = 0; step < steps; ++step) {
    for (char& each : other) ++each;
    const int64_t begin = lockstep::trace::now();
    publish_step(step);
    sum += lockstep::trace::now() - begin;
  }
  std::cout << static_cast<double>(sum) / steps << '\n';
  return 0;
}

// Rank 0 is a server, which the others ask for something, again and again.
int serve_for_ever(const Arguments&) {
  if (rank() == 0) observe::serves(std::stoi(variable("WORLD_SIZE")) - 1);
  const int server = rank() == 0 ? 0 : pid_of(0);
  for (int step = 0;; ++step) {
    observe::begin_step(step);
    if (rank() == 0) {
      const observe::Serving serving;
      observe::has_applied_gradient(step % 3);
      std::this_thread::sleep_for(milliseconds(10));
      continue;
    }
    compute_for(milliseconds(5));
    const lockstep::PhaseScope exchange(Phase::kExchange);
    const observe::WaitScope wait(server, 0);
    std::this_thread::sleep_for(milliseconds(10));
  }
}

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
      {"stand-still", stand_still},
      {"be-stopped-for-a-while", be_stopped_for_a_while},
      {"hold-up", hold_up},
      {"save-slowly", save_slowly},
      {"wait-in-a-circle", wait_in_a_circle},
      {"take-steps", take_steps},
      {"straggle", straggle},
      {"wait-for-data", wait_for_data},
      {"serve", serve_for_ever},
      {"publish", publish},
  };
  return actions.at(argv[1])(Arguments(argv + 2, argv + argc));
}
