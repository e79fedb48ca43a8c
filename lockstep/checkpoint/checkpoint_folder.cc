// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/checkpoint_folder.h"

#include <algorithm>
#include <iomanip>

#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/base/trace.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step-";
constexpr const char* kSuffix = ".safetensors";

std::string file_name(std::int64_t step) { return concat(kPrefix, std::setw(8), std::setfill('0'), step, kSuffix); }

bool is_checkpoint(const fs::path& path) {
  return path.filename().string().starts_with(kPrefix) && path.extension() == kSuffix;
}

void remove_half_written(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename().string().find(".safetensors.tmp-") != std::string::npos) fs::remove(entry.path());
}

// Longer names have more digits, so they are later.
bool is_later(const fs::path& a, const fs::path& b) {
  const std::string name_a = a.filename(), name_b = b.filename();
  return name_a.size() != name_b.size() ? name_a.size() > name_b.size() : name_a > name_b;
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

}  // namespace

CheckpointFolder::CheckpointFolder(fs::path folder, int keep) : folder_(std::move(folder)), keep_(keep) {
  require_writable(folder_);
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
  const fs::path path = folder_ / file_name(step);
  {
    const trace::Span span("write checkpoint", step);
    save_safetensors(path, file, fetch);
  }
  int kept = 0;
  std::error_code ignored;  // a file that can't be removed is only a file too many
  for (const fs::path& each : newest_first())
    if (is_later(each, path) || ++kept > keep_) fs::remove(each, ignored);
}

std::optional<CheckpointFolder::Loaded> CheckpointFolder::load_newest() const {
  const auto files = newest_first();
  for (const fs::path& path : files) {
    try {
      return Loaded{path, SafetensorsReader(bytes_in(path), path, Checksum::kRequired)};
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
