// data/image_transforms.h: what happens to an image between its file and the batch. All of it is done where the batch is
// written; every random choice is drawn from (seed, epoch, sample).
//
// Flow:    data/image_dataset.h asks plan() what to do with a sample, then apply() does it
// Threads: const
#pragma once

#include <vector>

#include "lockstep/data/image.h"
#include "lockstep/data/random.h"

namespace lockstep {

enum class Crop {
  kNone,           // the whole image
  kCentre,         // its middle
  kRandom,         // a random place, in the image with `padding` zeros around it
  kRandomResized,  // a random place, area and aspect ratio, resized (Szegedy et al., "Going deeper with convolutions", 2015)
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

  // Beta(mixup, mixup) is the share of the sample, the rest is another's (Zhang et al., "mixup", 2018); 0: no mixup. The
  // target is then (B, classes) float, as with one_hot.
  double mixup = 0;
  bool one_hot = false;

  bool soft_target() const { return one_hot || mixup > 0; }
};

// Throws UsageError: values that make no sense for images of so many channels.
void check_transforms(const ImageTransforms& transforms, std::int64_t channels);

// The shape of a sample made of an image of `stored` shape.
ImageShape output_shape(const ImageTransforms& transforms, const ImageShape& stored);

// The same without chance, for validation: kRandomResized becomes kCentre of an image resized to 8/7 (256 for 224), kRandom
// becomes kNone or kCentre; no flip, jitter or mixup.
ImageTransforms without_augmentation(ImageTransforms transforms);

Placement draw_placement(const ImageTransforms& transforms, const ImageShape& stored, SampleRandom& random);

// `image` holds the part of the stored image that the placement's box is counted in. into: output_shape(), float.
void apply_transforms(const ImageTransforms& transforms, const ImageView& image, const Placement& placement,
                      SampleRandom& random, float* into);

// The share of the sample in a mix, from Beta(alpha, alpha).
double draw_share(double alpha, SampleRandom& random);

}  // namespace lockstep
