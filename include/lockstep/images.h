// lockstep/images.h: images as samples: sources of stored bytes, transforms, and the dataset that makes batches of them.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/data/loader/random.h"
#include "lockstep/dataset.h"
#include "lockstep/sampler.h"

// ---- images as they are stored: bytes, and how they lie in memory.

namespace lockstep {

struct ImageShape {
  std::int64_t channels = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::int64_t values() const { return channels * height * width; }
  bool operator==(const ImageShape&) const = default;
};

// Bytes of pixels that somebody else owns. Planar (C, H, W): pixel_stride 1; interleaved (H, W, C): pixel_stride C.
struct ImageView {
  const std::uint8_t* pixels = nullptr;
  ImageShape shape;
  std::ptrdiff_t channel_stride = 0;
  std::ptrdiff_t row_stride = 0;
  std::ptrdiff_t pixel_stride = 0;
};

inline ImageView planar(const std::uint8_t* pixels, const ImageShape& shape) {
  return {pixels, shape, shape.height * shape.width, shape.width, 1};
}
inline ImageView interleaved(const std::uint8_t* pixels, const ImageShape& shape) {
  return {pixels, shape, 1, shape.width * shape.channels, shape.channels};
}

// A part of an image in pixels, from its upper left corner; it may reach over the edges, where there is nothing but
// zeros.
struct Box {
  double left = 0;
  double top = 0;
  double width = 0;
  double height = 0;
};

// What becomes of a sample: `box`, resized to height x width, mirrored by choice.
struct Placement {
  Box box;
  std::int64_t height = 0;
  std::int64_t width = 0;
  bool flip = false;
  // Every pixel of the box is a pixel of the result.
  bool is_copy() const;
};

inline bool Placement::is_copy() const {
  return box.width == static_cast<double>(width) && box.height == static_cast<double>(height) &&
         box.left == static_cast<double>(static_cast<std::int64_t>(box.left)) &&
         box.top == static_cast<double>(static_cast<std::int64_t>(box.top));
}

// Byte value v of channel c becomes v * scale[c] + shift[c].
struct Normalisation {
  static constexpr std::int64_t kMaxChannels = 4;
  float scale[kMaxChannels] = {1, 1, 1, 1};
  float shift[kMaxChannels] = {};
};

}  // namespace lockstep

// ---- where images come from: memory, a folder, packed records. It gives bytes as they are stored;
// what is made of them is lockstep/images.h's.
//
// Threads: const; the loader's workers call it at the same time

namespace lockstep {

struct StoredImage {
  std::span<const std::uint8_t> bytes;  // valid as long as the source and the scratch memory are left alone
  bool encoded = false;                 // JPEG or PNG; else planar pixels of `shape`
  ImageShape shape;                     // of planar pixels
  std::int64_t label = 0;               // in [0, classes())
};

class ImageSource {
 public:
  virtual ~ImageSource() = default;
  virtual std::string name() const = 0;
  virtual std::int64_t size() const = 0;
  virtual std::int64_t channels() const = 0;  // of every sample; what is encoded becomes RGB: 3
  virtual std::int64_t classes() const = 0;
  virtual ImageShape common_shape() const = 0;  // of all images; height and width 0: they differ, or nobody knows
  virtual bool in_memory() const { return false; }

  // Throws DataError: unreadable, damaged.
  virtual StoredImage read(std::int64_t index, std::vector<std::uint8_t>& scratch) const = 0;

  // These are about to be read: a source on disk starts reading them now, all at once.
  virtual void will_read(std::span<const std::int64_t> indices) const { static_cast<void>(indices); }

  virtual std::string origin(std::int64_t index) const = 0;  // file and place of a sample, for messages
  virtual std::shared_ptr<const SampleOrder> shuffled_order() const { return nullptr; }
};

}  // namespace lockstep

// ---- what happens to an image between its file and the batch. All of it is done where the batch
// is written; every random choice is drawn from (seed, epoch, sample).
//
// Flow:    lockstep/images.h asks plan() what to do with a sample, then apply() does it
// Threads: const

namespace lockstep {

enum class Crop {
  kNone,           // the whole image
  kCentre,         // its middle
  kRandom,         // a random place, in the image with `padding` zeros around it
  kRandomResized,  // a random place, area and aspect ratio, resized (Szegedy et al., "Going deeper with convolutions",
                   // 2015)
};

struct ImageTransforms {
  // Of the training images scaled to [0, 1]; a value per channel, or one for all.
  std::vector<float> mean = {0};
  std::vector<float> deviation = {1};

  // What a sample becomes; 0: as stored. Needed where images differ in size, and for every crop but kNone.
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::int64_t shorter_edge = 0;  // kCentre and kRandom resize the image to this first; 0: not
  Crop crop = Crop::kNone;
  std::int64_t padding = 0;
  double least_area = 0.08;  // kRandomResized: share of the image
  double most_area = 1;
  double most_stretch = 4.0 / 3;  // kRandomResized: of the aspect ratio, either way
  bool flip = false;              // left to right, half of the samples

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

// Throws UsageError: values that make no sense for images of so many channels.
void check_transforms(const ImageTransforms& transforms, std::int64_t channels);

// The shape of a sample made of an image of `stored` shape.
ImageShape output_shape(const ImageTransforms& transforms, const ImageShape& stored);

// The same without chance, for validation: kRandomResized becomes kCentre of an image resized to 8/7 (256 for 224),
// kRandom becomes kNone or kCentre; no flip, jitter or mixup.
ImageTransforms without_augmentation(ImageTransforms transforms);

Placement draw_placement(const ImageTransforms& transforms, const ImageShape& stored, SampleRandom& random);

// `image` holds the part of the stored image that the placement's box is counted in. into: output_shape(), float.
void apply_transforms(const ImageTransforms& transforms, const ImageView& image, const Placement& placement,
                      SampleRandom& random, float* into);

// The share of the sample in a mix, from Beta(alpha, alpha).
double draw_share(double alpha, SampleRandom& random);

}  // namespace lockstep

// ---- ImageTransforms as --augment writes them.

namespace lockstep {

// "crop:4,flip,jitter:0.4" -> transforms, on top of `base`:
//   resize:N | resize:HxW     to this size, without keeping the aspect
//   crop:P                    a random place, with P zeros around the image
//   center-crop:N[:EDGE]      the middle of the image, resized to EDGE along its shorter edge first
//   random-resized-crop:N[:LEAST_AREA]
//   flip
//   jitter:BRIGHTNESS[:CONTRAST[:SATURATION[:HUE]]]
//   mixup:ALPHA, one-hot
//   normalise:MEAN:DEVIATION  values of the channels with + between them, such as 0.5+0.5+0.5
// Throws UsageError naming the part that it does not understand.
ImageTransforms parse_transforms(const std::string& text, ImageTransforms base);

}  // namespace lockstep

// ---- images out of a source, transformed and normalised while the batch is written.
//
// Flow:    ImageSource -> decode (JPEG, PNG) -> image_transforms -> the batch's memory, one pass per sample
// Owns:    the source, shared
// Threads: const after construction

namespace lockstep {

class ImageDataset : public Dataset {
 public:
  // Throws UsageError (transforms that contradict each other or the images), DataError (no images; without a size in
  // the transforms the first image has to be readable, for its size is everybody's).
  ImageDataset(std::shared_ptr<const ImageSource> source, ImageTransforms transforms);

  std::string name() const override { return source_->name(); }
  std::int64_t size() const override { return source_->size(); }
  std::int64_t classes() const { return source_->classes(); }
  const ImageSource& source() const { return *source_; }
  const ImageTransforms& transforms() const { return transforms_; }
  const ImageShape& sample_shape() const { return shape_; }

  // data: (B, C, H, W) float32; target: (B) int64, with mixup or one-hot (B, classes) float32.
  Batch make_batch(std::span<const std::int64_t> indices) const override { return assemble({.indices = indices}); }
  Batch assemble(const BatchRequest& request) const override;
  void will_read(std::span<const std::int64_t> indices) const override { source_->will_read(indices); }
  std::shared_ptr<const SampleOrder> shuffled_order() const override { return source_->shuffled_order(); }

 private:
  struct Worker;
  ImageShape first_shape() const;
  std::int64_t write_image(std::int64_t index, SampleRandom& random, Worker& worker, float* into) const;
  void write_mixed(std::int64_t index, SampleRandom& random, Worker& worker, float* into, float* target) const;

  std::shared_ptr<const ImageSource> source_;
  ImageTransforms transforms_;
  ImageShape shape_;  // of a sample in a batch
};

}  // namespace lockstep

// ---- images of one size that lie in memory as bytes.
//
// Owns:    the bytes and the labels
// Threads: const after construction

namespace lockstep {

class MemoryImages : public ImageSource {
 public:
  // images: (N, H, W) or (N, C, H, W) uint8; labels: (N), any whole-number dtype, in [0, classes). `origin` names the
  // file. Throws DataError naming what does not fit.
  MemoryImages(std::string name, const torch::Tensor& images, const torch::Tensor& labels, std::int64_t classes,
               std::string origin);

  std::string name() const override { return name_; }
  std::int64_t size() const override { return images_.size(0); }
  std::int64_t channels() const override { return shape_.channels; }
  std::int64_t classes() const override { return classes_; }
  ImageShape common_shape() const override { return shape_; }
  bool in_memory() const override { return true; }
  StoredImage read(std::int64_t index, std::vector<std::uint8_t>& scratch) const override;
  std::string origin(std::int64_t index) const override;

  const torch::Tensor& images() const { return images_; }  // (N, C, H, W) uint8
  const torch::Tensor& labels() const { return labels_; }  // (N) int64

 private:
  std::string name_;
  torch::Tensor images_;
  torch::Tensor labels_;
  std::int64_t classes_;
  std::string origin_;
  ImageShape shape_;
  const std::uint8_t* pixels_;
  const std::int64_t* label_;
};

}  // namespace lockstep

// ---- a folder of images by class: FOLDER/CLASS/NAME.jpg, .jpeg or .png. Classes are numbered in the
// order of their names, as torchvision's ImageFolder does it.
//
// Owns:    the list of files; an image is read each time it is asked for
// Threads: const after construction

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
