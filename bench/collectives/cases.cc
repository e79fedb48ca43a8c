// SPDX-License-Identifier: Apache-2.0
#include "bench/collectives/cases.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <stdexcept>

namespace lockstep::bench {
namespace {

constexpr int kRounds = 5;
constexpr double kRoundSeconds = 0.01;
constexpr double kMostCalls = 1000;

struct DTypeSize {
  const char* name;
  size_t bytes;
};
constexpr DTypeSize kDTypes[] = {{"float32", 4}, {"float64", 8}, {"float16", 2}, {"bfloat16", 2},
                                 {"int32", 4},   {"int64", 8},   {"uint8", 1}};

size_t size_of(const std::string& dtype) {
  for (const DTypeSize& one : kDTypes)
    if (dtype == one.name) return one.bytes;
  throw std::invalid_argument("no dtype " + dtype);
}

int connect_to(const std::string& address) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  address.copy(name.sun_path, sizeof name.sun_path - 1);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0 || ::connect(socket, reinterpret_cast<sockaddr*>(&name), sizeof name) != 0)
    throw std::runtime_error("no benchmark at " + address);
  return socket;
}

// Without the newline; empty at the end.
std::string read_line(int socket) {
  std::string line;
  for (char letter = 0; ::read(socket, &letter, 1) == 1 && letter != '\n';) line += letter;
  return line;
}

void write_line(int socket, const std::string& line) {
  const std::string all = line + "\n";
  if (::write(socket, all.data(), all.size()) != static_cast<ssize_t>(all.size()))
    throw std::runtime_error("the benchmark has gone");
}

double seconds_of(const std::function<void()>& call, int times) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / times;
}

}  // namespace

size_t Case::count() const { return std::max<size_t>(1, bytes / size_of(dtype)); }

size_t Case::part(size_t ranks) const { return std::max<size_t>(1, count() / ranks); }

size_t Case::whole(size_t ranks) const { return part(ranks) * ranks; }

const std::vector<std::string>& operations() {
  static const std::vector<std::string> all{"barrier",   "all_reduce", "reduce",  "reduce_scatter", "all_gather",
                                            "broadcast", "gather",     "scatter", "all_to_all",     "send_receive"};
  return all;
}

const std::vector<std::string>& dtypes() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> names;
    for (const DTypeSize& one : kDTypes) names.emplace_back(one.name);
    return names;
  }();
  return all;
}

std::string to_word(const Case& one) {
  return one.operation + ":" + std::to_string(one.bytes) + ":" + one.dtype + ":" + one.memory + ":" + one.algorithm;
}

Case from_word(const std::string& word) {
  std::istringstream in(word);
  Case one;
  std::string bytes;
  std::getline(in, one.operation, ':');
  std::getline(in, bytes, ':');
  std::getline(in, one.dtype, ':');
  std::getline(in, one.memory, ':');
  std::getline(in, one.algorithm, ':');
  one.bytes = std::stoull(bytes);
  return one;
}

std::function<void()> there_and_back(int rank, std::function<void()> send, std::function<void()> receive) {
  if (rank > 1) return [] {};
  if (rank == 1) std::swap(send, receive);
  return [=] {
    send();
    receive();
  };
}

double seconds_per_call(System& system, const std::function<void()>& call) {
  call();
  system.barrier();
  const double once = system.slowest(seconds_of(call, 1));
  const int calls = static_cast<int>(std::clamp(kRoundSeconds / std::max(once, 1e-9), 1.0, kMostCalls));
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    system.barrier();
    rounds.push_back(system.slowest(seconds_of(call, calls)));
  }
  std::nth_element(rounds.begin(), rounds.begin() + kRounds / 2, rounds.end());
  return rounds[kRounds / 2];
}

void serve(System& system, const std::string& address) {
  const int socket = connect_to(address);
  std::string last;
  std::function<void()> call;
  write_line(socket, std::to_string(system.rank()));
  for (std::string word = read_line(socket); !word.empty(); word = read_line(socket)) {
    if (word != last) call = system.prepare(from_word(word));
    last = word;
    write_line(socket, call ? std::to_string(1e9 * seconds_per_call(system, call)) : "none");
  }
  ::close(socket);
}

}  // namespace lockstep::bench
