// data/image_folder.h: a folder of images by class: FOLDER/CLASS/NAME.jpg, .jpeg or .png. Classes are numbered in the order
// of their names, as torchvision's ImageFolder does it.
//
// Owns:    the list of files; an image is read each time it is asked for
// Threads: const after construction
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "lockstep/data/image_source.h"

namespace lockstep {

class ImageFolder : public ImageSource {
 public:
  // `classes`: the names in their order, where they must agree with another folder's; empty: the folders there are.
  // Throws DataError: no such folder, no class folders, a class of `classes` that is missing, a class without images.
  explicit ImageFolder(std::filesystem::path folder, std::vector<std::string> classes = {});

  std::string name() const override { return folder_.filename().string(); }
  std::int64_t size() const override { return static_cast<std::int64_t>(files_.size()); }
  std::int64_t channels() const override { return 3; }
  std::int64_t classes() const override { return static_cast<std::int64_t>(classes_.size()); }
  ImageShape common_shape() const override { return {3, 0, 0}; }
  StoredImage read(std::int64_t index, std::vector<std::uint8_t>& scratch) const override;
  std::string origin(std::int64_t index) const override;

  const std::vector<std::string>& class_names() const { return classes_; }

 private:
  struct File {
    std::string path;  // within the folder
    std::int64_t label;
  };
  void add_class(const std::string& name, std::int64_t label);

  std::filesystem::path folder_;
  std::vector<std::string> classes_;
  std::vector<File> files_;
};

}  // namespace lockstep
