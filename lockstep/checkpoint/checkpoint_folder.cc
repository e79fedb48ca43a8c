// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <functional>
#include <iomanip>
#include <utility>

#include "lockstep/base/file.h"
#include "lockstep/base/host_name.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/write_all.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step-";
constexpr const char* kSuffix = ".safetensors";

std::string stem_of(std::int64_t step) { return concat(kPrefix, std::setw(8), std::setfill('0'), step); }

// Of step-STEP… ; -1: another file.
std::int64_t step_of(const fs::path& path) {
  const std::string name = path.filename();
  std::int64_t step = -1;
  if (!name.starts_with(kPrefix)) return -1;
  std::from_chars(name.data() + std::strlen(kPrefix), name.data() + name.size(), step);
  return step;
}

// Without the shards of one.
bool is_checkpoint(const fs::path& path) {
  const std::int64_t step = step_of(path);
  const std::string name = path.filename();
  return step >= 0 && (name == stem_of(step) + kSuffix || name == stem_of(step) + kIndexSuffix);
}

bool is_shard(const fs::path& path) {
  const std::int64_t step = step_of(path);
  return step >= 0 && path.filename().string().starts_with(stem_of(step) + "-") && path.extension() == kSuffix;
}

bool is_later(const fs::path& a, const fs::path& b) {
  return std::pair(step_of(a), a.string()) > std::pair(step_of(b), b.string());
}

// What can't be removed is only a file too many.
void remove_half_written(const fs::path& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const bool half = entry.path().filename().string().find(".tmp-") != std::string::npos;
    const bool without_index =
        is_shard(entry.path()) && !fs::exists(folder / (stem_of(step_of(entry.path())) + kIndexSuffix));
    if ((half && step_of(entry.path()) >= 0) || without_index) fs::remove(entry.path(), ignored);
  }
}

// First what makes the files of `step` a checkpoint.
void remove_checkpoint(const fs::path& folder, std::int64_t step) {
  std::error_code ignored;
  for (const char* suffix : {kSuffix, kIndexSuffix}) fs::remove(folder / (stem_of(step) + suffix), ignored);
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (is_shard(entry.path()) && step_of(entry.path()) == step) fs::remove(entry.path(), ignored);
}

void require_writable(const fs::path& folder) try {
  fs::create_directories(folder);
  const fs::path probe = folder / ".writable";
  write_file(probe, "");
  fs::remove(probe);
} catch (const std::exception& error) {
  throw CheckpointError({.what = concat("can't write checkpoints into ", folder.string()),
                         .here = split(error.what(), '\n').front(),
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
  const fs::path path = folder / ".lock";
  UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
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

// The files of a checkpoint, and how to write the i-th.
struct CheckpointFolder::Files {
  std::vector<std::vector<std::string>> names;  // of the tensors of each
  std::size_t bytes = 0;
  std::function<void(std::size_t i, const fs::path& path)> write;
};

CheckpointFolder::CheckpointFolder(fs::path folder, int keep, std::size_t shard_bytes)
    : folder_(std::move(folder)), keep_(keep), shard_bytes_(shard_bytes) {
  require_writable(folder_);
  lock_ = lock_folder(folder_);
  remove_half_written(folder_);
}

std::vector<fs::path> CheckpointFolder::newest_first() const {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder_))
    if (is_checkpoint(entry.path())) files.push_back(entry.path());
  std::sort(files.begin(), files.end(), is_later);
  return files;
}

void CheckpointFolder::save(std::int64_t step, const TensorFile& file, const FetchTensor& fetch) {
  const auto shards = split(file);
  Files files{.write = [&](std::size_t i, const fs::path& path) { save_safetensors(path, shards[i], fetch); }};
  for (const TensorFile& shard : shards) {
    files.names.emplace_back();
    for (const auto& [name, tensor] : shard.tensors) {
      files.names.back().push_back(name);
      files.bytes += tensor.nbytes();
    }
  }
  save_files(step, files);
}

void CheckpointFolder::save(std::int64_t step, FileImage& image) {
  Files files{.write = [&](std::size_t i, const fs::path& path) { image.write(image.files()[i], path); }};
  for (const FileImage::File& file : image.files()) {
    files.names.push_back(file.names);
    files.bytes += file.tensor_bytes;
  }
  save_files(step, files);
}

void CheckpointFolder::save_files(std::int64_t step, const Files& files) {
  const std::string stem = stem_of(step);
  const std::size_t count = files.names.size();
  if (count == 1) {
    files.write(0, folder_ / (stem + kSuffix));
    fs::remove(folder_ / (stem + kIndexSuffix));  // of a run that was resumed from an earlier step
  } else {
    remove_checkpoint(folder_, step);  // likewise: its shards must not be mixed with ours
    for (std::size_t i = 0; i < count; ++i) files.write(i, folder_ / shard_name(stem, i, count));
    write_file(folder_ / (stem + kIndexSuffix), index_of_shards(stem, files.names, files.bytes));
  }
  remove_all_but(step);
}

void CheckpointFolder::remove_all_but(std::int64_t newest) {
  int kept = 0;
  for (const fs::path& each : newest_first())
    if (step_of(each) > newest || ++kept > keep_) remove_checkpoint(folder_, step_of(each));
}

std::optional<CheckpointFolder::Loaded> CheckpointFolder::load_newest() const {
  const auto files = newest_first();
  for (const fs::path& path : files) {
    try {
      return Loaded{path, CheckpointReader(path, Checksum::kRequired)};
    } catch (const Error& error) {
      log_warning(concat("passing over a checkpoint: ", error.text().what));
    }
  }
  if (files.empty()) return std::nullopt;
  throw CheckpointError({.what = concat("none of the ", files.size(), " checkpoints is whole"),
                         .here = folder_.string(),
                         .likely = "a disk that was full or is failing",
                         .next = "start again without --resume, in another --checkpoint-dir"});
}

}  // namespace lockstep
