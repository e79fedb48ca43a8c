// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iomanip>
#include <regex>
#include <set>
#include <utility>

#include "lockstep/base/files/file.h"
#include "lockstep/base/files/write_all.h"
#include "lockstep/base/log.h"
#include "lockstep/base/process/host_name.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLock = ".lock";

// A file whose whole name is one that lockstep makes.
struct OwnFile {
  enum Kind { kCheckpoint, kShard, kTemporary };
  fs::path path;
  Kind kind;
  int64_t step;
};

std::optional<OwnFile> own_file(const fs::path& path) {
  static const std::regex names(R"((?:\.lock|step-(\d{8}|[1-9]\d{8,17})(?:\.safetensors(?:\.index\.json)?|)"
                                R"((?:-again)?-(\d{5})-of-(\d{5})\.safetensors))(\.tmp-[0-9a-f]{16})?)");
  const std::string name = path.filename();
  std::smatch match;
  if (!std::regex_match(name, match, names) || name == kLock) return std::nullopt;
  if (match[2].matched && (match[2] < "00001" || match[2] > match[3])) return std::nullopt;
  const int64_t step = match[1].matched ? std::stoll(match[1]) : -1;
  if (match[4].matched) return OwnFile{path, OwnFile::kTemporary, step};
  return OwnFile{path, match[2].matched ? OwnFile::kShard : OwnFile::kCheckpoint, step};
}

std::vector<OwnFile> own_files(const fs::path& folder) {
  std::vector<OwnFile> files;
  std::error_code unknown;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const auto file = own_file(entry.path()); file && !entry.is_directory(unknown)) files.push_back(*file);
  return files;
}

int64_t step_of(const fs::path& path) { return own_file(path)->step; }

// The index comes before one file of the same step: a save replaces it last (save()).
bool is_later(const fs::path& a, const fs::path& b) {
  return std::pair(step_of(a), a.string()) > std::pair(step_of(b), b.string());
}

std::vector<fs::path> newest_first(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const OwnFile& file : own_files(folder))
    if (file.kind == OwnFile::kCheckpoint) files.push_back(file.path);
  std::ranges::sort(files, is_later);
  return files;
}

// The shards that an index names, or all of its step if it can't be read; the index or the one file comes last.
std::vector<fs::path> files_of(const fs::path& checkpoint) {
  std::vector<fs::path> files;
  if (checkpoint.string().ends_with(kIndexSuffix)) {
    std::optional<std::set<std::string>> named;
    try {
      named = shards_in(checkpoint);
    } catch (const Error&) {
    }
    for (const auto& [path, kind, step] : own_files(checkpoint.parent_path()))
      if (kind == OwnFile::kShard && step == step_of(checkpoint) && (!named || named->contains(path.filename())))
        files.push_back(path);
  }
  files.push_back(checkpoint);
  return files;
}

// Removes half-written files of a killed writer, and shards that no index names. One that can't be removed is only a file too many.
void remove_leftovers(const fs::path& folder) try {
  std::set<fs::path> kept;
  for (const fs::path& checkpoint : newest_first(folder))
    for (const fs::path& file : files_of(checkpoint)) kept.insert(file);
  std::error_code ignored;
  for (const OwnFile& file : own_files(folder))
    if (!kept.contains(file.path)) fs::remove(file.path, ignored);
} catch (const std::exception&) {
}

// Adds `end` to the names of a checkpoint's files, and a number if there is such a file already.
void rename_checkpoint(const fs::path& checkpoint, std::string end) {
  const auto files = files_of(checkpoint);
  const std::string first = end;
  const auto is_taken = [&](const fs::path& file) { return fs::exists(fs::symlink_status(file.string() + end)); };
  for (int next = 2; std::ranges::any_of(files, is_taken); ++next) end = concat(first, "-", next);
  for (const fs::path& file : files) fs::rename(file, file.string() + end);
}

void require_writable(const fs::path& folder) try {
  fs::create_directories(folder);
  static_cast<void>(AtomicFile(folder / kLock));  // makes a temporary file and removes it
} catch (const std::exception& error) {
  throw CheckpointError({.what = concat("can't write checkpoints into ", folder.string()),
                         .here = first_line_of(error),
                         .likely = "no permission, a read-only disk, or a file where the folder should be",
                         .next = "name another --checkpoint-dir"});
}

CheckpointError locked_by(const std::string& holder, const fs::path& folder) {
  return CheckpointError({.what = concat(folder.string(), " is in use by ", holder.empty() ? "another run" : holder),
                          .here = folder.string(),
                          .likely = "the same job started twice, or an earlier one that has not ended yet",
                          .next = "end that one, or name another --checkpoint-dir"});
}

// Kept as long as the file is open; the kernel gives it back when a process dies. The file stays: a process that removed
// it could remove another one's.
UniqueFd lock_folder(const fs::path& folder) {
  const fs::path path = folder / kLock;
  UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!file) throw system_error("open", path);
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) throw locked_by(read_file(path), folder);
    log_warning(concat("can't lock ", path.string(), " (", std::strerror(errno), "): let no other run use the folder"));
  } else if (::ftruncate(file.get(), 0) == 0) {  // on a full disk it stays empty
    static_cast<void>(write_all(file.get(), concat("process ", ::getpid(), " on ", host_name())));
  }
  return file;
}

}  // namespace

LoadedCheckpoint find_checkpoint(const fs::path& path, std::optional<int64_t> step) {
  if (fs::is_regular_file(path)) return {path, CheckpointReader(path, Checksum::kRequired)};
  std::string trouble = "there is none";
  for (const fs::path& each : fs::is_directory(path) ? newest_first(path) : std::vector<fs::path>()) {
    if (step && step_of(each) != *step) continue;
    try {
      return {each, CheckpointReader(each, Checksum::kRequired)};
    } catch (const Error& error) {
      trouble = what_of(error);
    }
  }
  throw CheckpointError({.what = concat("no checkpoint", step ? concat(" of step ", *step) : "", " to read: ", trouble),
                         .here = path.string(),
                         .next = "name the --checkpoint-dir of a run that has saved one"});
}

CheckpointFolder::CheckpointFolder(fs::path folder, int keep, size_t shard_bytes)
    : folder_(std::move(folder)), keep_(keep), shard_bytes_(shard_bytes) {
  require_writable(folder_);
  lock_ = lock_folder(folder_);
  remove_leftovers(folder_);
  if (const auto files = newest_first(folder_); !files.empty()) unread_ = step_of(files.front());
}

bool CheckpointFolder::empty() const { return newest_first(folder_).empty(); }

void CheckpointFolder::require_newest(int64_t step) const {
  if (step >= unread_) return;
  throw CheckpointError({.what = concat("can't save step ", step, ": ", folder_.string(), " has a checkpoint of step ",
                                        unread_, ", which this run has neither read nor written"),
                         .likely = "a program that was started again from the beginning",
                         .next = "go on from the newest, go back to another one (after=STEP), or name another folder"});
}

// The rename or removal of an index, or else the rename of one file, makes the new checkpoint the one that is there. Until then
// the old one is whole.
fs::path CheckpointFolder::save(int64_t step, const TensorFile& file, const FetchTensor& fetch) try {
  std::string stem = concat("step-", std::setw(8), std::setfill('0'), step);
  const fs::path whole = folder_ / (stem + ".safetensors"), index = folder_ / (stem + kIndexSuffix);
  const auto shards = split_into_shards(file, shard_bytes_);
  const size_t count = shards.size();
  if (count == 1) {
    save_safetensors(whole, file, fetch);
    if (::unlink(index.c_str()) != 0 && errno != ENOENT && errno != EISDIR) throw system_error("remove", index);
  } else {
    const auto old = files_of(index);
    if (std::ranges::find(old, folder_ / shard_name(stem, 0, count)) != old.end()) stem += "-again";
    for (size_t i = 0; i < count; ++i) save_safetensors(folder_ / shard_name(stem, i, count), shards[i], fetch);
    write_file(index, index_of_shards(stem, shards));
    ::unlink(whole.c_str());
  }
  rename_later(step);
  remove_older(step);
  return count == 1 ? whole : index;
} catch (...) {
  remove_leftovers(folder_);
  throw;
}

void CheckpointFolder::remove_older(int64_t newest) {
  std::set<int64_t> kept;
  std::error_code ignored;
  for (const fs::path& each : newest_first(folder_)) {
    const int64_t step = step_of(each);
    if (step > newest || step == also_ || std::ssize(kept) < keep_) kept.insert(step);
    if (!kept.contains(step)) fs::remove(each, ignored);
  }
  remove_leftovers(folder_);
}

void CheckpointFolder::rename_later(int64_t newest) {
  for (const fs::path& each : newest_first(folder_)) {
    if (step_of(each) <= newest) return;
    const std::string end = concat(".after-", newest);
    log_warning(concat("a run goes on from step ", newest, ": adding ", end, " to the name of ", each.string()));
    rename_checkpoint(each, end);
  }
}

void CheckpointFolder::go_back(int64_t step) {
  const auto files = newest_first(folder_);
  const auto found = std::ranges::find(files, step, step_of);
  if (found == files.end())
    throw CheckpointError({.what = concat("there is no checkpoint of step ", step, " to go back to"),
                           .here = folder_.string(),
                           .likely = "only the newest are kept; or a run that has gone back already was started again",
                           .next = "name the step of one that is there, or none to go on from the newest"});
  CheckpointReader(*found, Checksum::kRequired);
  rename_later(step);
  unread_ = step;
}

std::optional<LoadedCheckpoint> CheckpointFolder::load_newest() {
  const auto files = newest_first(folder_);
  std::vector<fs::path> damaged;
  for (auto path = files.begin(); path != files.end(); ++path) {
    try {
      LoadedCheckpoint found{*path, CheckpointReader(*path, Checksum::kRequired)};
      for (const fs::path& each : damaged) rename_checkpoint(each, ".damaged");
      unread_ = path + 1 == files.end() ? -1 : step_of(*(path + 1));
      return found;
    } catch (const CheckpointError& error) {
      damaged.push_back(*path);
      log_warning(concat("skipping a checkpoint: ", error.text().what));
    }
  }
  if (files.empty()) return std::nullopt;
  throw CheckpointError({.what = concat("none of the ", files.size(), " checkpoints is whole"),
                         .here = folder_.string(),
                         .likely = "a disk that was full or is failing",
                         .next = "start again without --resume, in another --checkpoint-dir"});
}

}  // namespace lockstep
