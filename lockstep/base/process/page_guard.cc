// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/page_guard.h"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <utility>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

const size_t kPageBytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));

// ---- What the handler of SIGSEGV reads. It may interrupt a thread that holds any lock, so it takes none: parts are
// never freed, only used again, and the one that was written to stays as it is while its writer is stopped.

struct GuardedPart {
  std::atomic<const std::byte*> begin{nullptr};  // none: unused
  std::atomic<size_t> bytes{0};
  std::atomic<const char*> name{nullptr};
  std::atomic<bool> is_gradient{false};
};

constexpr size_t kParts = 1 << 16;  // those beyond are guarded, but not named
std::atomic<GuardedPart*> all_parts{nullptr};
std::atomic<size_t> used_parts{0};
struct sigaction previous_action {};

void print(const char* text) { static_cast<void>(!::write(STDERR_FILENO, text, std::strlen(text))); }

void print_number(pid_t number) {
  std::array<char, 12> digits{};
  std::to_chars(digits.begin(), digits.end() - 1, number);
  print(digits.data());
}

// Those that are unused have no beginning.
std::span<const GuardedPart> guarded_parts() { return {all_parts.load(), used_parts.load()}; }

const GuardedPart* part_at(const std::byte* address) {
  for (const GuardedPart& part : guarded_parts())
    if (const std::byte* begin = part.begin; begin != nullptr && address >= begin && address < begin + part.bytes)
      return &part;
  return nullptr;
}

bool gradients_are_published() {
  for (const GuardedPart& part : guarded_parts())
    if (part.begin != nullptr && part.is_gradient) return true;
  return false;
}

void print_error(const GuardedPart& part) {
  print(part.is_gradient ? "lockstep: the gradient of " : "lockstep: parameter ");
  print(part.name);
  print(part.is_gradient ? " was written after backward() had published it\n" : " was written outside step()\n");
  print("  here:   process ");
  print_number(::getpid());
  print(gradients_are_published() ? ", between backward() and step()\n" : ", after step() and before backward()\n");
  print(part.is_gradient ? "  likely: clipping by hand, zero_grad() before step(), or a second backward() of torch's\n"
                         : "  likely: an update by hand, through data() or a pointer; Embedding's max_norm; "
                           "Module::load; another optimizer\n");
  print(part.is_gradient
            ? "  next:   see the lines below. Clip with optimizer.set_clipping(), or give DistributedDataParallel\n"
              "          mean_in_grad = true\n"
            : "  next:   see the lines below. Where all ranks write the same values, do it in write_parameters()\n");
  print("  trace:  addr2line -Cpfe PROGRAM OFFSET gives the line of PROGRAM(+OFFSET)\n");
  std::array<void*, 64> frames{};
  ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), frames.size()), STDERR_FILENO);
}

// Ends with the action that was there before: the write is tried again, and this time the signal is that action's.
void on_segmentation_fault(int number, siginfo_t* info, void* context) {
  const GuardedPart* const part =
      info->si_code == SEGV_ACCERR ? part_at(static_cast<const std::byte*>(info->si_addr)) : nullptr;
  if (part != nullptr) print_error(*part);
  const bool has_default = (previous_action.sa_flags & SA_SIGINFO) == 0 &&
                           (previous_action.sa_handler == SIG_DFL || previous_action.sa_handler == SIG_IGN);
  if (part != nullptr || has_default) {
    ::sigaction(number, &previous_action, nullptr);
    if (info->si_code <= 0) ::raise(number);  // sent by kill(): nothing will be tried again
  } else if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(number, info, context);
  } else {
    previous_action.sa_handler(number);
  }
}

// ---- What is guarded

class GuardedPages {
 public:
  GuardedPages() {
    all_parts = new GuardedPart[kParts];
    std::array<void*, 1> frame{};
    ::backtrace(frame.data(), 1);  // loads what it needs now, not in the handler
    struct sigaction action {};
    action.sa_sigaction = on_segmentation_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(SIGSEGV, &action, &previous_action);
  }

  void add(PageGuard::Kind kind, std::byte* begin, size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (kind == PageGuard::Kind::kParameters && ++parameters_[{begin, bytes}] > 1) return;
    if (kind == PageGuard::Kind::kGradients || writes_ == 0) protect(begin, bytes, PROT_READ);
  }

  void remove(PageGuard::Kind kind, std::byte* begin, size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (kind == PageGuard::Kind::kParameters && --parameters_.at({begin, bytes}) > 0) return;
    parameters_.erase({begin, bytes});
    protect(begin, bytes, PROT_READ | PROT_WRITE);
  }

  void begin_write() {
    const std::lock_guard lock(mutex_);
    if (writes_++ == 0) protect_parameters(PROT_READ | PROT_WRITE);
  }

  void end_write() {
    const std::lock_guard lock(mutex_);
    if (--writes_ == 0) protect_parameters(PROT_READ);
  }

  size_t add_part(const PageGuard::Part& part, bool is_gradient) {
    const std::lock_guard lock(mutex_);
    size_t i = 0;
    while (i < kParts - 1 && all_parts[i].begin != nullptr) ++i;
    GuardedPart& free = all_parts[i];
    free.name = names_.insert(part.name).first->c_str();
    free.bytes = part.bytes;
    free.is_gradient = is_gradient;
    free.begin = part.begin;
    if (i >= used_parts) used_parts = i + 1;
    return i;
  }

  static void remove_part(size_t i) { all_parts[i].begin = nullptr; }

 private:
  static void protect(std::byte* begin, size_t bytes, int how) {
    if (::mprotect(begin, bytes, how) != 0) throw system_error("protect", "memory of parameters or gradients");
  }

  void protect_parameters(int how) {
    for (const auto& [range, guards] : parameters_) protect(range.first, range.second, how);
  }

  std::mutex mutex_;
  std::map<std::pair<std::byte*, size_t>, int> parameters_;  // a range of pages -> its guards
  int writes_ = 0;
  std::set<std::string> names_;
};

GuardedPages& guarded_pages() {
  static auto* const instance =
      new GuardedPages;  // a module in a global variable is released after static objects are gone
  return *instance;
}

}  // namespace

int check_interval() {
  static const int interval = [] {
    const char* const told = std::getenv("LOCKSTEP_CHECK");
    int number = 0;
    if (told != nullptr && (!parse_int(std::string(told), number) || number < 0))
      throw EnvironmentError({.what = concat("LOCKSTEP_CHECK is \"", told, "\", not a number"),
                              .next = "give it 1 to check every step, n to check every n-th, 0 for none"});
    return number;
  }();
  return interval;
}

size_t guarded_bytes(size_t bytes) { return check_interval() > 0 ? round_up(bytes, kPageBytes) + kPageBytes : bytes; }

std::byte* first_page(std::byte* memory) {
  if (check_interval() == 0) return memory;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  return memory + (round_up(address, kPageBytes) - address);
}

PageGuard::PageGuard(Kind kind, const std::vector<Part>& parts)
    : kind_(kind), begin_(const_cast<std::byte*>(parts.front().begin)), bytes_(0) {
  bytes_ = round_up(static_cast<size_t>(parts.back().begin + parts.back().bytes - begin_), kPageBytes);
  for (const Part& part : parts) parts_.push_back(guarded_pages().add_part(part, kind == Kind::kGradients));
  guarded_pages().add(kind_, begin_, bytes_);
}

PageGuard::~PageGuard() {
  guarded_pages().remove(kind_, begin_, bytes_);
  for (const size_t part : parts_) GuardedPages::remove_part(part);
}

ParameterWrite::ParameterWrite() {
  if (check_interval() > 0) guarded_pages().begin_write();
}
ParameterWrite::~ParameterWrite() {
  if (check_interval() > 0) guarded_pages().end_write();
}

}  // namespace lockstep
