// SPDX-License-Identifier: Apache-2.0
// data/images/image_transforms.h: what ImageDataset does with each sample, as ImageTransforms say.
//
// Flow:    ImageDataset -> draw_placement -> decode that part -> apply_transforms -> the batch
// Threads: pure functions; a SampleRandom belongs to one thread
#pragma once

#include "lockstep/data/images/image_kernels.h"
#include "lockstep/data/loader/random.h"

namespace lockstep {

// Throws UsageError: values that make no sense for images of so many channels.
void check_transforms(const ImageTransforms& transforms, int64_t channels);

// The shape of a sample made of an image of `stored` shape.
ImageShape output_shape(const ImageTransforms& transforms, const ImageShape& stored);

Placement draw_placement(const ImageTransforms& transforms, const ImageShape& stored, SampleRandom& random);

// `image` holds the part of the stored image that the placement's box is counted in. into: output_shape(), float.
void apply_transforms(const ImageTransforms& transforms, const ImageView& image, const Placement& placement,
                      SampleRandom& random, float* into);

// The share of the sample in a mix, from Beta(alpha, alpha).
double draw_share(double alpha, SampleRandom& random);

}  // namespace lockstep
