// SPDX-License-Identifier: Apache-2.0
// lockstep/images.h: datasets of images: where their bytes come from, and what happens to them on the way into a batch.
//
// Flow:    ImageSource (memory, a folder, shards) -> decode JPEG or PNG -> ImageTransforms, in one pass per
//          sample -> the batch's memory
// Owns:    an ImageDataset shares its source; MemoryImages owns bytes and labels, ImageFolder a list of file names
// Threads: everything is const after construction; the loader's workers call it at the same time
// Ranks:   no communication; random choices are a function of (seed, epoch, sample), so all ranks would draw the same
#pragma once

#include <filesystem>

#include "lockstep/dataset.h"
#include "lockstep/sampler.h"

namespace lockstep {

using Bytes = std::vector<uint8_t>;
using ByteView = std::span<const uint8_t>;

// ---- Sources

struct ImageShape {
  int64_t channels = 0;
  int64_t height = 0;
  int64_t width = 0;
  int64_t values() const { return channels * height * width; }
  bool operator==(const ImageShape&) const = default;
};

struct StoredImage {
  ByteView bytes;        // valid until the source or the scratch memory changes
  bool encoded = false;  // a JPEG or PNG file; else pixels (C, H, W) of `shape`
  ImageShape shape;      // of the pixels
  int64_t label = 0;     // in [0, classes())
};

// Gives images as they are stored. Derive from it for images of your own that should get lockstep's transforms.
class ImageSource {
 public:
  virtual ~ImageSource() = default;
  virtual std::string name() const = 0;
  virtual int64_t size() const = 0;
  virtual int64_t classes() const = 0;
  // The shape of all images; height and width 0: they differ, or are not known. Encoded images become RGB: 3 channels.
  virtual ImageShape common_shape() const = 0;
  virtual bool in_memory() const { return false; }

  // `scratch` is memory that the source may fill and return a view of. Throws DataError: unreadable, damaged.
  virtual StoredImage read(int64_t index, Bytes& scratch) const = 0;

  // As Dataset::will_read and Dataset::shuffled_order.
  virtual void will_read(Indices indices) const { static_cast<void>(indices); }
  virtual SampleOrderPtr shuffled_order() const { return nullptr; }

  virtual std::string origin(int64_t index) const = 0;  // file and place of a sample, for error messages
};

using ImageSourcePtr = std::shared_ptr<const ImageSource>;

// Images of one size that are bytes in memory.
class MemoryImages : public ImageSource {
 public:
  // images: (N, H, W) or (N, C, H, W) uint8; labels: (N), any whole-number dtype, in [0, classes). `origin` names the
  // file in errors. Throws DataError naming what does not fit.
  MemoryImages(std::string name, const Tensor& images, const Tensor& labels, int64_t classes, std::string origin);

  std::string name() const override { return name_; }
  int64_t size() const override { return images_.size(0); }
  int64_t classes() const override { return classes_; }
  ImageShape common_shape() const override { return shape_; }
  bool in_memory() const override { return true; }
  StoredImage read(int64_t index, Bytes& scratch) const override;
  std::string origin(int64_t index) const override;

  const Tensor& images() const { return images_; }  // (N, C, H, W) uint8

 private:
  std::string name_;
  Tensor images_;
  Tensor labels_;
  int64_t classes_;
  std::string origin_;
  ImageShape shape_;
  const uint8_t* pixels_;
  const int64_t* label_;
};

// A folder of images by class: FOLDER/CLASS/NAME.jpg, .jpeg or .png. Classes are numbered in the order of their names,
// as in torchvision's ImageFolder. Links are followed, also out of the folder; one that leads back to a folder above it
// is left out. An image is read each time it is asked for.
class ImageFolder : public ImageSource {
 public:
  // `classes`: the names in their order, where they must agree with another folder's; empty: the folders there are.
  // Throws DataError: no such folder, no class folders, a class of `classes` that is missing, a class without images.
  explicit ImageFolder(std::filesystem::path folder, std::vector<std::string> classes = {});

  std::string name() const override { return folder_.filename().string(); }
  int64_t size() const override { return static_cast<int64_t>(files_.size()); }
  int64_t classes() const override { return static_cast<int64_t>(classes_.size()); }
  ImageShape common_shape() const override { return {3, 0, 0}; }
  StoredImage read(int64_t index, Bytes& scratch) const override;
  std::string origin(int64_t index) const override;

  const std::vector<std::string>& class_names() const { return classes_; }

 private:
  struct File {
    std::string path;  // within the folder
    int64_t label;
  };
  void add_class(const std::string& name, int64_t label);
  void add_images(const std::filesystem::path& folder, int64_t label, std::vector<std::filesystem::path>& above);

  std::filesystem::path folder_;
  std::vector<std::string> classes_;
  std::vector<File> files_;
};

// ---- Transforms

enum class Crop {
  kNone,           // the whole image
  kCentre,         // its middle
  kRandom,         // a random place, in the image with `padding` zeros around it
  kRandomResized,  // a random place, area and aspect ratio, resized (Szegedy et al., "Going deeper with convolutions",
                   // 2015)
};

struct ImageTransforms {
  // Mean and deviation of the training images scaled to [0, 1]; a value per channel, or one for all.
  std::vector<float> mean = {0};
  std::vector<float> deviation = {1};

  // Size of a sample; 0: as stored. Needed where images differ in size, and for every crop but kNone.
  int64_t height = 0;
  int64_t width = 0;
  int64_t shorter_edge = 0;  // kCentre and kRandom resize the image to this first; 0: not
  Crop crop = Crop::kNone;
  int64_t padding = 0;
  double least_area = 0.08;  // kRandomResized: share of the image; the aspect ratio is from 3/4 to 4/3
  bool flip = false;         // left to right, half of the samples

  // Colour jitter: factors from [1 - x, 1 + x]; hue from [-x, x] turns.
  float brightness = 0;
  float contrast = 0;
  float saturation = 0;
  float hue = 0;

  // Beta(mixup, mixup) is the share of the sample, the rest is another's (Zhang et al., "mixup", 2018); 0: no mixup.
  // The target is then (B, classes) float, as with one_hot.
  double mixup = 0;
  bool one_hot = false;

  bool soft_target() const { return one_hot || mixup > 0; }
};

// The same without random choices, for validation: kRandomResized becomes kCentre of an image resized to 8/7 (256 for
// 224), kRandom becomes kCentre; no flip, jitter or mixup.
ImageTransforms without_augmentation(ImageTransforms transforms);

// "crop:4,flip,jitter:0.4", as --augment takes it -> transforms, on top of `base`:
//   resize:N | resize:HxW     to this size, without keeping the aspect ratio
//   crop:P                    a random place, with P zeros around the image
//   center-crop:N[:EDGE]      the middle of the image, resized to EDGE along its shorter edge first
//   random-resized-crop:N[:LEAST_AREA]
//   flip
//   jitter:BRIGHTNESS[:CONTRAST[:SATURATION[:HUE]]]
//   mixup:ALPHA, one-hot
//   normalise:MEAN:DEVIATION  values of the channels with + between them, such as 0.5+0.5+0.5
// Throws UsageError naming the part that it does not understand.
ImageTransforms parse_transforms(const std::string& text, ImageTransforms base);

// ---- The dataset

class ImageDataset : public AssembledDataset {
 public:
  // Throws UsageError (transforms that contradict each other or the images), DataError (no images; or, where the
  // transforms give no size, the first image is unreadable: its size is taken for all).
  ImageDataset(ImageSourcePtr source, ImageTransforms transforms);

  std::string name() const override { return source_->name(); }
  int64_t size() const override { return source_->size(); }
  int64_t classes() const override { return source_->classes(); }
  const ImageSource& source() const { return *source_; }
  const ImageTransforms& transforms() const { return transforms_; }

  // data: (B, C, H, W) float32; target: (B) int64, with mixup or one-hot (B, classes) float32.
  Batch assemble(const BatchRequest& request) const override;
  void will_read(Indices indices) const override { source_->will_read(indices); }
  SampleOrderPtr shuffled_order() const override { return source_->shuffled_order(); }

 private:
  class Worker;
  ImageShape first_shape() const;

  ImageSourcePtr source_;
  ImageTransforms transforms_;
  ImageShape shape_;  // of a sample in a batch
};

}  // namespace lockstep
