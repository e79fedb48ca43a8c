// SPDX-License-Identifier: Apache-2.0
// agent/clusters/pmix.cc: the texts that Open MPI's mpirun keeps for its ranks, by libpmix, which comes with Open MPI and is loaded
// when it is needed.
//
// Flow:    open_launcher_store() -> here <-> libpmix <-> mpirun's daemon
// Owns:    PMIx_Init, until PMIx_Finalize when the process exits: it can be called once in a process, and an
//          MPI_Init() counts on it
// Threads: one at a time; libpmix has a thread of its own
#include "agent/clusters/launcher_store.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <thread>

#include "lockstep/base/shared_library.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

// The few parts of libpmix's stable binary interface (PMIx standard, versions 2 to 5) that are used here.
constexpr int kPmixSuccess = 0;
constexpr uint8_t kPmixGlobal = 3;   // for ranks of all machines
constexpr uint16_t kPmixString = 3;  // what a value holds
struct PmixProcess {
  std::array<char, 256> job;
  uint32_t rank;
};
struct PmixValue {
  uint16_t type;
  const char* text;
  std::array<char, 48> others;  // no member of the union is longer
};

struct Pmix {
  Pmix() {
    if (!library.is_complete()) throw mpirun_error("can't load libpmix.so.2");
  }

  SharedLibrary library{"libpmix.so.2"};
  int (*init)(PmixProcess*, void*, size_t) = library.find("PMIx_Init");
  int (*put)(uint8_t, const char*, PmixValue*) = library.find("PMIx_Put");
  int (*commit)() = library.find("PMIx_Commit");
  int (*fence)(const PmixProcess*, size_t, const void*, size_t) = library.find("PMIx_Fence");
  int (*get)(const PmixProcess*, const char*, const void*, size_t, PmixValue**) = library.find("PMIx_Get");
  int (*finalize)(const void*, size_t) = library.find("PMIx_Finalize");
  PmixProcess me{};
};

Pmix& pmix() {
  static Pmix* const opened = new Pmix;  // libpmix's thread uses it until the process ends
  return *opened;
}

// libpmix's calls have no deadline, so each gets a thread, which is left behind if it hangs.
void call(const char* name, milliseconds timeout, const std::function<int()>& function) {
  std::packaged_task<int()> task(function);
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(timeout) != std::future_status::ready) throw mpirun_error(concat("no answer to ", name));
  if (const int code = result.get(); code != kPmixSuccess) throw mpirun_error(concat(name, " failed with code ", code));
}

class PmixStore final : public LauncherStore {
 public:
  explicit PmixStore(milliseconds timeout) : timeout_(timeout) {
    [[maybe_unused]] static const bool opened = [timeout] {
      Pmix& library = pmix();
      call("PMIx_Init", timeout, [&library] { return library.init(&library.me, nullptr, 0); });
      return std::atexit([] { pmix().finalize(nullptr, 0); }) == 0;
    }();
  }

  void exchange(const std::string& mine) override {
    name_ = next_name();
    PmixValue value{.type = kPmixString, .text = mine.c_str(), .others = {}};
    if (pmix().put(kPmixGlobal, name_.c_str(), &value) != kPmixSuccess) throw mpirun_error("PMIx_Put failed");
    call("PMIx_Commit", timeout_, [] { return pmix().commit(); });
    call("PMIx_Fence", timeout_, [] { return pmix().fence(nullptr, 0, nullptr, 0); });
  }

  std::string text_of(int rank) override {
    auto found = std::make_shared<PmixValue*>(nullptr);
    call("PMIx_Get", timeout_, [rank, name = name_, found] {
      PmixProcess process = pmix().me;
      process.rank = static_cast<uint32_t>(rank);
      return pmix().get(&process, name.c_str(), nullptr, 0, found.get());
    });
    if (*found == nullptr || (*found)->type != kPmixString) throw mpirun_error(concat("rank ", rank, " gave no text"));
    return (*found)->text;  // a few bytes that are never freed: that is a macro of PMIx's header
  }

 private:
  milliseconds timeout_;
  std::string name_;
};

}  // namespace

std::unique_ptr<LauncherStore> open_pmix(milliseconds timeout) { return std::make_unique<PmixStore>(timeout); }

}  // namespace lockstep
