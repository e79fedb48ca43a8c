// SPDX-License-Identifier: Apache-2.0
// data/images/encoded_image.h: decodes JPEG (libjpeg-turbo) and PNG (libpng); of a JPEG only the part that is needed, at
// the smallest scale that the result allows.
//
// Threads: a DecodeScratch belongs to one thread
#pragma once

#include "lockstep/data/images/image_kernels.h"
#include "lockstep/error.h"

namespace lockstep {

constexpr int64_t kMostPixels = int64_t{1} << 26;  // of an encoded image; a larger one is refused

using DecodeScratch = Bytes;  // holds the pixels of the last decoded image

// The error of a decoder: a damaged `format` file, and why.
DataError damaged_image(const char* format, const std::string& why);

bool is_jpeg(ByteView file);

// The shape after decoding to RGB, from the header alone. Throws DataError with `origin`: neither JPEG nor PNG, a
// damaged header, more than kMostPixels.
ImageShape encoded_shape(ByteView file, const std::string& origin);

// Decodes the part of the image that placement.box covers to interleaved RGB in `scratch`. A JPEG may be decoded at
// 1/2, 1/4 or 1/8 of its size, never smaller than the result; placement.box is rewritten to pixels of the returned
// view. Throws DataError (without `here`): damaged or cut in the part that was read.
ImageView decode_image(ByteView file, Placement& placement, DecodeScratch& scratch);

// The same for JPEG, through libjpeg-turbo.
ImageShape jpeg_shape(ByteView file);
ImageView decode_jpeg(ByteView file, Placement& placement, DecodeScratch& scratch);

}  // namespace lockstep
