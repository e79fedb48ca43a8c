// data/parse_transforms.h: ImageTransforms as --augment writes them.
#pragma once

#include <string>

#include "lockstep/data/image_transforms.h"

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
