// SPDX-License-Identifier: Apache-2.0
#include "lockstep/images.h"

#include <strings.h>

#include <algorithm>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/data_file.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 30;  // of a file; a larger one is refused

bool is_image(const fs::path& file) {
  const auto ends_in = [extension = file.extension().string()](const char* known) {
    return ::strcasecmp(extension.c_str(), known) == 0;
  };
  return ends_in(".jpg") || ends_in(".jpeg") || ends_in(".png");
}

std::vector<std::string> folders_in(const fs::path& folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (std::error_code ignored; entry.is_directory(ignored)) names.push_back(entry.path().filename().string());
  if (error || names.empty())
    throw DataError(
        {.what = concat("no class folders in ", folder.string(), error ? concat(": ", error.message()) : ""),
         .here = folder.string(),
         .likely = "a wrong path",
         .next = "name the folder that holds a folder per class"});
  std::ranges::sort(names);
  return names;
}

}  // namespace

ImageFolder::ImageFolder(fs::path folder, std::vector<std::string> classes)
    : folder_(std::move(folder)), classes_(std::move(classes)) {
  if (!folder_.has_filename()) folder_ = folder_.parent_path();  // "DIR/"
  if (classes_.empty()) classes_ = folders_in(folder_);
  for (size_t i = 0; i < classes_.size(); ++i) add_class(classes_[i], to_int64(i));
}

void ImageFolder::add_class(const std::string& name, int64_t label) {
  const size_t before = files_.size();
  std::string trouble;
  try {
    std::vector<fs::path> above{fs::canonical(folder_)};
    add_images(folder_ / name, label, above);
  } catch (const fs::filesystem_error& error) {
    trouble = concat(": ", error.path1().string(), ": ", error.code().message());
  }
  if (!trouble.empty() || files_.size() == before)
    throw DataError(
        {.what = concat("class ", name, " has no images", trouble),
         .here = (folder_ / name).string(),
         .likely = "a folder that is missing or was not unpacked, or images that are neither JPEG nor PNG"});
  std::ranges::sort(std::span(files_).subspan(before), {}, &File::path);
}

// above: the folders on the way here, without links: a link to one of them leads round in circles, or to other classes.
void ImageFolder::add_images(const fs::path& folder, int64_t label, std::vector<fs::path>& above) {
  const fs::path real = fs::canonical(folder);
  if (std::ranges::find(above, real) != above.end()) return;
  above.push_back(real);
  std::error_code ignored;  // a link to nothing, or to itself, is no folder
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.is_directory(ignored))
      add_images(entry.path(), label, above);
    else if (is_image(entry.path()))
      files_.push_back({entry.path().lexically_relative(folder_).string(), label});
  above.pop_back();
}

StoredImage ImageFolder::read(int64_t index, Bytes& scratch) const {
  const File& file = files_[to_size(index)];
  const DataFile stored(folder_ / file.path);
  if (stored.size() > kMostBytes)
    throw DataError(
        {.what = concat(stored.size(), " bytes, more than an image has"), .likely = "another kind of file"});
  scratch.resize(stored.size());
  stored.read(0, scratch);
  return {.bytes = scratch, .encoded = true, .label = file.label};
}

std::string ImageFolder::origin(int64_t index) const { return (folder_ / files_[to_size(index)].path).string(); }

}  // namespace lockstep
