// SPDX-License-Identifier: Apache-2.0
#include "lockstep/observe/job_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <chrono>
#include <new>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<double>::is_always_lock_free,
              "shared between processes");

constexpr size_t kHeaderBytes = round_up(sizeof(JobPageHeader), kCacheLine);

size_t page_bytes(int ranks) { return kHeaderBytes + to_size(ranks) * sizeof(RankRecord); }

UniqueFd make_page_file(size_t bytes) {
  UniqueFd fd(::memfd_create("lockstep-page", MFD_CLOEXEC));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw system_error("make", "the page of the job");
  return fd;
}

// A file that is shorter than its header says must not be mapped: reading it would end this process.
void require_page(const JobPageHeader& header, size_t bytes, const std::string& path) {
  const bool fits = header.magic == JobPageHeader::kMagic && header.version == JobPageHeader::kVersion &&
                    header.record_bytes == sizeof(RankRecord) && header.ranks > 0 && page_bytes(header.ranks) <= bytes;
  if (!fits)
    throw DataError({.what = "no page of a job, or one of another version of lockstep",
                     .here = path,
                     .likely = "a launcher of another version",
                     .next = "start the job and look at it with the same version"});
}

}  // namespace

JobPage::JobPage(UniqueFd fd, size_t bytes) : fd_(std::move(fd)), pid_(::getpid()) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (memory == MAP_FAILED) throw system_error("map", "the page of a job");
  memory_ = {static_cast<std::byte*>(memory), bytes};
}

JobPage::JobPage(JobPageHeader header) : JobPage(make_page_file(page_bytes(header.ranks)), page_bytes(header.ranks)) {
  header.launcher = pid_;
  header.started_at = std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  new (memory_.data()) JobPageHeader(header);
  for (int local = 0; local < header.ranks; ++local) new (&record(local)) RankRecord;
}

JobPage JobPage::open(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) throw system_error("open", path);
  JobPageHeader header;
  struct stat file {};
  const bool read = ::pread(fd.get(), &header, sizeof header, 0) == sizeof header && ::fstat(fd.get(), &file) == 0;
  if (!read) throw system_error("read", path);
  require_page(header, to_size(file.st_size), path);
  return {std::move(fd), page_bytes(header.ranks)};
}

JobPage::~JobPage() {
  if (!memory_.empty()) ::munmap(memory_.data(), memory_.size());
}

RankRecord& JobPage::record(int seat) const {
  return reinterpret_cast<RankRecord*>(memory_.data() + kHeaderBytes)[seat];
}

void JobPage::begin(int seat, int job_rank, int generation) const {
  RankRecord* const record = new (&this->record(seat)) RankRecord;
  record->job_rank.store(job_rank, std::memory_order_relaxed);
  record->generation.store(generation, std::memory_order_relaxed);
}

void JobPage::rename(const std::string& job, int world_size, int node_rank) const {
  auto& header = *reinterpret_cast<JobPageHeader*>(memory_.data());
  header.job = {};
  job.copy(header.job.data(), header.job.size() - 1);
  header.world_size = world_size;
  header.node_rank = node_rank;
}

void JobPage::end(int seat) const { record(seat).phase.store(Phase::kEnded, std::memory_order_relaxed); }

std::string JobPage::address(int seat) const { return concat(path(), ' ', seat); }

std::string JobPage::path() const { return concat("/proc/", pid_, "/fd/", fd_.get()); }

}  // namespace lockstep
