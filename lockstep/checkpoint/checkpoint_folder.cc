#include "lockstep/checkpoint/checkpoint_folder.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/base/file.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step-";
constexpr const char* kSuffix = ".safetensors";

std::string file_name(std::int64_t step) {
  std::ostringstream name;
  name << kPrefix << std::setw(8) << std::setfill('0') << step << kSuffix;
  return std::move(name).str();
}

bool is_checkpoint(const fs::path& path) {
  return path.filename().string().starts_with(kPrefix) && path.extension() == kSuffix;
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
}

std::vector<fs::path> CheckpointFolder::newest_first() const {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder_))
    if (is_checkpoint(entry.path())) files.push_back(entry.path());
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
    const auto length = [](const fs::path& path) { return path.filename().string().size(); };
    return length(a) != length(b) ? length(a) > length(b) : a > b;
  });
  return files;
}

void CheckpointFolder::save(std::int64_t step, const TensorFile& file) {
  save_safetensors(folder_ / file_name(step), file);
  const auto files = newest_first();
  for (std::size_t i = static_cast<std::size_t>(keep_); i < files.size(); ++i) fs::remove(files[i]);
}

std::optional<CheckpointFolder::Loaded> CheckpointFolder::load_newest() const {
  const auto files = newest_first();
  for (const fs::path& path : files) {
    try {
      std::string bytes = read_file(path);
      from_safetensors(bytes, path, Checksum::kRequired);
      return Loaded{path, std::move(bytes)};
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
